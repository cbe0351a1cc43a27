"""Llama 3, 3.1 and 3.2 (text): the network in `model`, the facts about it in `spec`."""
