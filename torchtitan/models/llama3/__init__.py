"""Llama 3, 3.1 and 3.2 (text): its flavors in `spec`, its formats in `hugging_face` and `meta`."""
