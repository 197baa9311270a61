"""The values of the figures that texts name: keys of docs/figures.toml, each with its place in a result file.

[cpu-int8]
file = "cpu_lookup"                         # benchmarks/results/cpu_lookup.json
rows = "finding"                            # optional: another table of that file
where = { format = "int8", batch = 4096 }   # the one row with these fields; a list allows several values
field = "native M rows/s"
each = { ids = ["uniform", "zipf 1.05"] }   # optional: a value for each combination, the last name varying fastest
over = "fbgemm M rows/s"                    # optional: divided by this field of the same row,
                                            # or by the field of another: { ids = "uniform" }
take = "range"                              # optional: min, max, median, or range (min and max) of the rows found
scale = 1e-3                                # optional: the printed number is the value times this
"""

import json
import statistics
import tomllib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
RESULTS = TOP / "benchmarks" / "results"
KEYS = TOP / "docs" / "figures.toml"


class FigureError(Exception):
    """A key that names nothing, or not one value; the message says which and why."""


@cache
def keys() -> dict[str, dict[str, Any]]:
    """All keys of docs/figures.toml."""
    try:
        return tomllib.loads(KEYS.read_text())
    except tomllib.TOMLDecodeError as e:
        raise FigureError(f"{KEYS.relative_to(TOP)} is not TOML: {e}") from None


@cache
def read_result(file: str) -> dict[str, Any]:
    """A result file; those of campaigns with a field `campaign` in each row, and all rows together."""
    path = RESULTS / f"{file}.json"
    if not path.exists():
        raise FigureError(f"{path.relative_to(TOP)} does not exist")
    found: dict[str, Any] = json.loads(path.read_text())
    if "results" in found:
        found["rows"] = [{"campaign": r["name"], **row} for r in found["results"] for row in r["rows"]]
    return found


def values_of(key: str) -> list[float]:
    """The values that a key stands for, scaled, in the order in which a text has them."""
    if key not in keys():
        raise FigureError(f"{key} is no key of {KEYS.relative_to(TOP)}")
    spec = keys()[key]
    try:
        return [value * spec.get("scale", 1.0) for value in _values(spec)]
    except FigureError as e:
        raise FigureError(f"{key}: {e}") from None


def _values(spec: dict[str, Any]) -> list[float]:
    result = read_result(spec["file"])
    if "where" not in spec and "each" not in spec and spec.get("field") in result:
        return [_number(result, spec["field"])]
    each, table = spec.get("each", {}), result.get(spec.get("rows", "rows"), [])
    found: list[float] = []
    for chosen in product(*each.values()):
        where = {**spec.get("where", {}), **dict(zip(each, chosen, strict=True))}
        field = where.pop("field", spec.get("field"))
        rows = [row for row in table if _fits(row, where)]
        found += _taken(spec.get("take"), [_value(row, field, spec.get("over"), where, table) for row in rows], where)
    return found


def _fits(row: dict[str, Any], where: dict[str, Any]) -> bool:
    return all(row.get(k) in v if isinstance(v, list) else row.get(k) == v for k, v in where.items())


def _value(row: dict[str, Any], field: str, over: Any, where: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """A row's field, divided by what `over` names."""
    value = _number(row, field)
    if over is None:
        return value
    if isinstance(over, str):
        return value / _number(row, over)
    others = [other for other in rows if _fits(other, {**where, **over})]
    return value / _taken(None, [_number(other, field) for other in others], {**where, **over})[0]


def _number(row: dict[str, Any], field: str) -> float:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FigureError(f"the field {field!r} is {value!r}; expected a number; there are {', '.join(row)}")
    return value


def _taken(take: str | None, values: list[float], where: dict[str, Any]) -> list[float]:
    if take is None:
        if len(values) != 1:
            raise FigureError(f"{len(values)} rows have {where}; expected one")
        return values
    if not values:
        raise FigureError(f"no row has {where}")
    if take == "range":
        return [min(values), max(values)]
    if take not in ("min", "max", "median"):
        raise FigureError(f"take is {take!r}; expected min, max, median or range")
    return [min(values) if take == "min" else max(values) if take == "max" else statistics.median(values)]


def as_printed(value: float, text: str) -> str:
    """The value as `text` has it: as many decimals, or for an integer as many zeros, behind three digits at least."""
    plain = text.replace(",", "")
    decimals = len(plain.partition(".")[2])
    if "." not in plain:
        zeros = len(plain) - len(plain.rstrip("0"))
        decimals = -max(0, min(zeros, len(f"{value:.0f}") - 3))
    is_grouped = "," in text or len(plain) < 4
    return f"{round(value, decimals):{',' if is_grouped else ''}.{max(0, decimals)}f}"
