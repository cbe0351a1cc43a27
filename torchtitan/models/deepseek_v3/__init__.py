"""DeepSeek-V3: latent attention in `attention`, its flavors in `spec`, its format in
`hugging_face`."""
