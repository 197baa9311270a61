"""What a user who mistyped a name probably meant, for the end of an error."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `name`, whatever their case; None where none is."""
    by_case = {k.lower(): k for k in known}
    found = get_close_matches(name.lower(), by_case, 1, 0.7)
    return by_case[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?", or "" where nothing is like the name."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found!r}?"
