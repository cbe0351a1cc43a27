"""Checkpoints in the format of torch's distributed checkpoint (DCP), read without running them."""
