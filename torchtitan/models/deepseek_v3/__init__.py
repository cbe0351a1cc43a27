"""DeepSeek-V3: its attention in `latent_attention`, its flavors in `spec`, its format in
`hugging_face`."""
