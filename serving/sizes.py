"""Sizes as users write them: 64MiB, 1.5 GiB, 2GB, 512K, 1_000_000. K, M, G, T and KiB … are powers of 1024,
as in `docker run --shm-size`; KB … powers of 1000. Case does not matter."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator

_SIZE = re.compile(
    r"(?P<number>[0-9][0-9_]*(?:\.[0-9]+)?)\s*(?P<unit>[KMGT]?)(?P<rest>i?B?|i)", re.IGNORECASE | re.ASCII
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """ "64MiB" -> 67108864. ValueError: it is no size."""
    found = _SIZE.fullmatch(text.strip())
    unit, rest = ("", "") if found is None else (found["unit"].upper(), found["rest"].lower())
    if found is None or (not unit and rest.startswith("i")):
        raise ValueError(f"{text!r} is not a number of bytes; expected such as 64MiB, 2GB or 1_000_000")
    base = 1000 if unit and rest == "b" else 1024
    return int(Decimal(found["number"].replace("_", "")) * base ** _POWERS[unit])


def _parsed(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_parsed)]
