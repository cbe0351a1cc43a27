"""GPT-OSS: its block in `block`, its flavors in `spec`, its format in `hugging_face`."""
