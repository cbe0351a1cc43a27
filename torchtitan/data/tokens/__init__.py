"""Tokenized documents: shards of tokens, their index, and the formats of other software."""
