"""Uses a model after training: generates text, and measures its loss on held-out data.

Weights are those of a run, of one checkpoint, or of Hugging Face or Meta.
"""
