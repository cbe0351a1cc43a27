"""ViT-MAE: a vision transformer and its masked-autoencoder decoder in `model`, facts in `spec`."""
