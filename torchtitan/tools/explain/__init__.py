"""Looks inside a run: where its time went, what a trace says, what to try."""
