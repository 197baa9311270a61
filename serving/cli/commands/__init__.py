"""The commands of `tableside`, a file for each group."""
