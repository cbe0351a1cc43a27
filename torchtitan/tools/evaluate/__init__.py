"""Looks at what a model has learned, after training: samples of it, and its scores on tasks.

Weights are those of a run, of one checkpoint, or of Hugging Face or Meta. They are laid out anew:
on one rank, or with each matrix split over several.
"""
