"""Qwen3 with mixtures of experts: its flavors in `spec`, its format in `hugging_face`."""
