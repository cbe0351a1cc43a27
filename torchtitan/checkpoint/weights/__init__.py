"""Weights without the rest of a run: our format, Hugging Face's and Meta's."""
