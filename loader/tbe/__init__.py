"""FBGEMM's modules over a segment: without weights for inference, with them for training."""
