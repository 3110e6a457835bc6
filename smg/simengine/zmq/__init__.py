"""The embedded engine as a headless engine core over ZMQ: it dials a gateway, as vLLM's and TokenSpeed's do."""
