"""Writes the tables of README.md and docs/ from benchmarks/results.

    python benchmarks/figures.py

Between the lines `<!--table:NAME-->` and `<!--/table-->` a page has the table NAME of docs/figures.toml:

    [kernel]
    head = ["rows", "ours, µs", "ratio"]          # the headings
    file = "gpu_lookup"                           # benchmarks/results/gpu_lookup.json
    where = { D = 128, format = ["int8"] }        # takes the file's rows with one of these values
    cells = ["{ours_us:.1f}", "{ratio:.2f} ×"]    # {FIELD:FORMAT} is a field of the rows taken
    rows = [{ label = "uniform", where = { ids = "uniform" } }]

Where several rows are taken, their least and greatest values are printed: 1.0–1.4. A row may have a file,
cells and a where of its own; its where is added to the table's. `list` names another list of the file than
`rows`. The file `scale` is what benchmarks/scale.py makes of others. `columns` is a list of wheres:
each cell is written once for each of them.
"""

import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import scale

TOP = Path(__file__).resolve().parent.parent
RESULTS = TOP / "benchmarks" / "results"
TABLES = TOP / "docs" / "figures.toml"
MARKED = re.compile(r"<!--table:([\w-]+)-->\n.*?<!--/table-->", re.DOTALL)


class FigureError(Exception):
    """A cell that no row of its result file gives; the message names table, row and field."""


class Values(list[Any]):
    """One field of several rows. Its format is that of its least and its greatest value."""

    def __format__(self, spec: str) -> str:
        if not spec and len({*self}) == 1 and isinstance(self[0], str):
            return self[0]
        if not all(isinstance(value, int | float) for value in self):
            raise FigureError(f"expected numbers, found {list(self)}")
        printed = [format(value, spec) for value in (min(self), max(self))]
        return "–".join(dict.fromkeys(printed))


def pages() -> list[Path]:
    """README.md and the pages of docs/."""
    return [TOP / "README.md", *sorted((TOP / "docs").glob("*.md"))]


@cache
def tables() -> dict[str, Any]:
    """All tables of docs/figures.toml."""
    return tomllib.loads(TABLES.read_text())


@cache
def read_result(file: str) -> dict[str, Any]:
    """A result file; of `scale` what follows from others."""
    if file == "scale":
        return scale.lists(read_result)
    found: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    return found


def table_text(name: str) -> str:
    """Returns the table in Markdown. Raises FigureError if a cell has no value."""
    table = tables().get(name)
    if table is None:
        raise FigureError(f"{TABLES.name} has no table {name!r}")
    lines = [table["head"], ["---"] * len(table["head"])]
    for row in table["rows"]:
        try:
            lines.append([row["label"], *_cells(table, row)])
        except (FigureError, KeyError) as e:
            raise FigureError(f"table {name!r}, row {row['label']!r}: {e}") from None
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(table: dict[str, Any], row: dict[str, Any]) -> list[str]:
    spec = {**table, **row}
    listed = read_result(spec["file"])[spec.get("list", "rows")]
    printed = []
    for column in table.get("columns", [{}]):
        where = {**table.get("where", {}), **row.get("where", {}), **column}
        taken = [found for found in listed if _fits(found, where)]
        if not taken:
            raise FigureError(f"{spec['file']}.json has no row with {where}")
        fields = {field: Values(found[field] for found in taken) for field in taken[0]}
        printed += [cell.format_map(fields) for cell in spec["cells"]]
    return printed


def _fits(found: dict[str, Any], where: dict[str, Any]) -> bool:
    return all(found.get(k) in v if isinstance(v, list) else found.get(k) == v for k, v in where.items())


def with_tables(text: str) -> str:
    """Returns a page's text with its tables written anew."""
    return MARKED.sub(lambda m: f"<!--table:{m[1]}-->\n\n{table_text(m[1])}\n\n<!--/table-->", text)


def main() -> int:
    for page in pages():
        text = page.read_text()
        if (written := with_tables(text)) != text:
            page.write_text(written)
            print(f"{page.relative_to(TOP)}: tables written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
