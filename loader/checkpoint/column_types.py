"""Types of Arrow's columns for people, and what to do where ids are no integers."""

from typing import Any

import pyarrow as pa


def type_name(kind: Any) -> str:
    """A column's type, for people."""
    return f"categories of {kind.value_type}" if pa.types.is_dictionary(kind) else str(kind)


def id_remedy(kind: Any) -> str:
    """How a column of this type, as pandas writes some, becomes ids; "": it has integers, or nothing is known of its kind."""
    of = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_floating(of):
        return ' (pandas makes floats of integers where one is missing: leave such rows out, and write astype("int64"))'
    if pa.types.is_string(of) or pa.types.is_large_string(of):
        return ' (where they are numbers, write astype("int64"); else number or hash them, and do the same in requests)'
    return ' (write astype("int64"))' if of is not kind and pa.types.is_integer(of) else ""
