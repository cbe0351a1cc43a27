"""Images to samples: where they come from, and what is cut from them for an epoch."""
