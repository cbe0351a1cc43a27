"""Planted faults: what the tests must find. `python -m tests.mutations` plants and runs them."""
