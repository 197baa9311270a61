"""What a user who mistyped a name probably meant, for the end of an error."""

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns "; did you mean 'x'?", or "" if no name is near. prefix: common prefix of the names,
    ignored."""
    found = nearest(name.removeprefix(prefix), [k.removeprefix(prefix) for k in known])
    return "" if found is None else f"; did you mean {prefix + found!r}?"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the first of `known` with the smallest edit distance, ignoring case; None: all exceed one, and
    one per three characters."""
    slips = [(_distance(name.lower(), k.lower()), k) for k in known]
    best = min(slips, key=lambda pair: pair[0], default=None)
    return best[1] if best is not None and best[0] <= max(1, len(name) // 3) else None


def _distance(a: str, b: str) -> int:
    """Returns the optimal string alignment distance of a and b."""
    before: list[int] = []
    row: list[int] = [*range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        earlier, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and (x, a[i - 2]) == (b[j - 2], y):
                best = min(best, earlier[j - 2] + 1)
            row.append(best)
    return row[-1]
