"""ViT-MAE: a vision transformer with a masked-autoencoder decoder; facts about it are in `spec`."""
