"""Lookups of the same kinds at other places each time, drawn at random."""

import random
from collections.abc import Sequence

import numpy as np
from tables import table_of

from tableside.quant import LookupKind, Place, Pooling, Precision, RowFormat, RowSource

FORMATS = (RowFormat.INT8, RowFormat.INT4, RowFormat.FP16)
ROWS = 60


class Drawn:
    """Kinds of lookups, drawn; `request` draws some of them in any order, with places, inputs and the size of
    the outputs. Some have found masks.

    together: the vectors of pooled lookups lie side by side, those of the others behind them.
    """

    def __init__(self, seed: int, precisions: Sequence[Precision] = (Precision.FP32, Precision.FP16)) -> None:
        self.rng = random.Random(seed)
        self.together = self.rng.random() < 0.5
        one = self.rng.choice(precisions)
        self.tables, self.kinds = [], []
        for k in range(self.rng.randint(1, 5)):
            table = table_of(self.rng.choice(FORMATS), self.rng.choice([8, 12, 20, 6]), ROWS, seed=k)
            self.tables.append(table)
            precision = one if self.together else self.rng.choice(precisions)
            self.kinds.append(LookupKind(table, self.rng.choice(list(Pooling)), precision))

    def over(self, sources: Sequence[RowSource]) -> list[LookupKind]:
        """The kinds, with tables that lie elsewhere."""
        found = zip(self.kinds, sources, strict=True)
        return [LookupKind(table, k.pooling, k.precision) for k, table in found]

    def request(self, wrong: bool = False) -> tuple[np.ndarray, bytes, int]:
        rng = self.rng
        bags_of_all = rng.randint(0, 5)
        parts, places, at, out_at, column = [b"x" * rng.choice([0, 3, 8])], [], 0, 0, 0
        at = len(parts[0])
        numbers = rng.sample(range(len(self.kinds)), rng.randint(1, len(self.kinds)))
        pooled = [k for k in map(self.kinds.__getitem__, numbers) if k.pooling is not Pooling.NONE]
        row_bytes = sum(k.table.dim * k.precision.bytes for k in pooled)
        if self.together:
            out_at = row_bytes * bags_of_all
        for number in numbers:
            kind = self.kinds[number]
            is_pooled = kind.pooling is not Pooling.NONE
            bags = bags_of_all if self.together else rng.randint(0, 5)
            fixed = rng.randint(0, 3) if is_pooled and rng.random() < 0.4 else None
            lengths = [fixed if fixed is not None else rng.randint(0, 4) for _ in range(bags)]
            count = sum(lengths)
            ids = [rng.randrange(ROWS) for _ in range(count)]
            if wrong and ids:
                ids[rng.randrange(count)] = rng.choice([-1, ROWS, 2**40])
            weights = is_pooled and rng.random() < 0.4
            ids_at, lengths_at = at, at + 8 * count
            parts += [np.array(ids, np.int64).tobytes(), np.array(lengths, np.int32).tobytes()]
            at = lengths_at + 4 * bags
            weights_at = -1
            if weights:
                weights_at, at = at, at + 4 * count
                parts.append(np.array([rng.random() for _ in ids], np.float32).tobytes())
            size = kind.table.dim * kind.precision.bytes
            outputs = bags if is_pooled else count
            if self.together and is_pooled:
                place_at, column = column if bags else 0, column + size
            else:
                place_at, out_at = out_at, out_at + outputs * size
            uses_fixed = fixed is not None
            found = (
                -1 if uses_fixed or not is_pooled else lengths_at,
                fixed if uses_fixed else 0,
                bags if is_pooled else 0,
            )
            step = row_bytes if self.together and is_pooled else 0
            places.append(
                Place(number, ids_at, count, found[0], found[1] or 0, found[2], weights_at, place_at, step)
            )
        for n, place in enumerate(places):  # found masks lie behind all vectors
            if rng.random() < 0.2:
                places[n], out_at = place._replace(found_at=out_at), out_at + place.ids
        return np.array(places, np.int64), b"".join(parts), out_at
