"""The models of several owners of one model's ids."""
