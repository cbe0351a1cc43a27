"""Weights without the rest of a run: read and written as ours, Hugging Face's or Meta's."""
