"""Tables as a header has them, from their shapes."""

from collections.abc import Iterable, Mapping

from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.stored import StoredIds, StoredTable
from tableside.quant import RowFormat


def planned_tables(
    shapes: Iterable[tuple[str, str, RowFormat, int, int]], ids: Mapping[str, StoredIds] | None = None
) -> tuple[StoredTable, ...]:
    """Places tables of (name, key, format, rows, dim), with rows as for a GPU. ids: table -> how ids become
    rows."""
    return plan_tables(
        StoredTable(
            rows, row_format.row_bytes(dim), 0, 1, 0, name, key, row_format.label, dim, (ids or {}).get(name)
        )
        for name, key, row_format, rows, dim in shapes
    )
