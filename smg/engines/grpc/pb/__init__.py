"""Compiled messages of the worker protocols (``proto/*.proto``), in a descriptor pool of their own."""
