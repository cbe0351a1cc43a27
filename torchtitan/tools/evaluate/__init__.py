"""Evaluates a model after training: samples from it, and its scores on tasks.

Weights are those of a run, of one checkpoint, or of Hugging Face or Meta. They are placed on one
rank, or with each matrix split over several.
"""
