"""Pretrain large language models from a TOML recipe, on any layout, and resume them exactly."""

__version__ = "0.1.0"
