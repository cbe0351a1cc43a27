"""Qwen3 (dense): its flavors in `spec`, its format in `hugging_face`."""
