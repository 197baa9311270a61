"""Checkpoints of every kind, behind one interface: named matrices that are read a range of rows at a time."""

from tableside.loader.checkpoint.open import open_checkpoint
from tableside.loader.checkpoint.rows import Checkpoint, Matrix, RowShard

__all__ = ["Checkpoint", "Matrix", "RowShard", "open_checkpoint"]
