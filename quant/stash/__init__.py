"""Tables out of HBM while a training step or a scorer does without them."""
