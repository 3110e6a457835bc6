"""Multi-turn sessions of the Responses API: the loop, its output, what clients see of it."""
