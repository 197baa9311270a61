"""Tables of raw ids in a checkpoint: the contract and a file for each format."""
