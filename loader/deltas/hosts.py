"""Changes of a model that lies on several hosts (docs/hosts.md). Each host gets all of them and applies its
part, so hosts that passed the same ones have rows that belong together. A *mark* names them: it is a checksum
over their positions and contents, in order, whatever batches they were applied in."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tableside.loader.deltas.changes import TableChanges
from tableside.loader.deltas.checks import check_buckets, check_kind, check_numbers, check_shapes
from tableside.loader.errors import ChangeError
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.segment.segment import Segment
from tableside.quant.contract import Ids, Table
from tableside.quant.rows.ids import bucket_of


def next_mark(mark: int, source: str, passed: Sequence[str]) -> int:
    """Returns the mark behind more changes of a source. mark: before them; 0: of a loaded version. passed: as
    of `ChangeBatch`."""
    for one in passed:
        mark = xxhash.xxh3_64_intdigest(f"{source}\n{one}".encode(), seed=mark) or 1
    return mark


def passed_file(position: str, path: Path) -> str:
    """Names a file of changes at a position, for `ChangeBatch.passed`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
    return f"{position} {digest.hexdigest()}"


def passed_fields(position: str, fields: Sequence[bytes]) -> str:
    """The same of an entry's fields and values."""
    digest = xxhash.xxh3_64()
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return f"{position} {digest.hexdigest()}"


def changes_here(segment: Segment, block: TableChanges) -> TableChanges | None:
    """Returns the changes of rows that this host has; None: it has none. ChangeError: they fit no host."""
    header = segment.header
    for table in header.remote:
        if table.name == block.table and table.redis is not None:
            raise ChangeError(
                f"table {block.table!r} has its rows in Redis, which take no changes; expected changes of "
                "other tables: load the model again, or give the table owners (docs/hosts.md)"
            )
        if table.name == block.table:
            check_shapes(block, table.dim)
            check_kind(block, table.strings)
            _check_remote(table, block)
            return None
    if header.owner is None:
        return block
    if (held := segment.base.tables.get(block.table)) is None:
        return None  # a table that servers of the whole have
    is_here = ids_here(
        held, block.ids, header.owner.number == 0, header.owner.number == header.owner.owners - 1
    )
    if is_here.all():
        return block
    if not is_here.any():
        return None
    deleted = None if block.deleted is None else block.deleted[is_here]
    return replace(block, ids=block.ids[is_here], vectors=block.vectors[is_here], deleted=deleted)


def ids_here(table: Table, ids: Ids, is_first: bool = False, is_last: bool = False) -> NDArray[np.bool_]:
    """Returns the mask of ids that a share has, or that no share has. is_first, is_last: it has row numbers
    before, behind those of its rows, too."""
    if table.row_map is not None and (index := table.row_map.index) is not None:
        return (index.bucket_of(ids) >= 0) | (bucket_of(ids, index.buckets, index.bucket_ids) < 0)
    first, count = table.row_numbers
    return (is_first | (ids >= first)) & (is_last | (ids < first + count))


def _check_remote(t: RemoteTable, block: TableChanges) -> None:
    """Raises ChangeError where no owner takes a change."""
    if not t.buckets:
        deleted = np.zeros(block.rows, np.bool_) if block.deleted is None else block.deleted
        check_numbers(t.name, block.ids, deleted, 0, t.count, t.missing != "error")
    elif t.bucket_ids:
        check_buckets(t.name, block.ids, bucket_of(block.ids, t.buckets, t.bucket_ids))
