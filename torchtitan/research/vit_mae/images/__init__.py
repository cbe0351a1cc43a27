"""Data path from images to samples: sources of images, and crops for each epoch."""
