"""Parts of an evaluation: each holds the scores of one shard. A damaged part is made again.

    OUT/parts/00000.parquet       row, label, score_0 (score_1, slice); metadata: ids without a row
    OUT/parts/00000.parquet.xxh3  "XXH3_", hex xxh3-64 of that file, its name: what `xxhsum --check` reads
    OUT/parts/00000.partial-PID   a file being written

The checksum of the bytes in memory is written first, then the part under another name, which is renamed. A
kill leaves a checksum without a part at worst.
"""

import io
import json
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tableside.serving.errors import ServingError
from tableside.serving.evaluation.batches import WITHOUT_ROW, WithoutRow
from tableside.serving.evaluation.data import Shard
from tableside.serving.evaluation.work import Job

logger = logging.getLogger("tableside")


class DamagedPart(ServingError):
    """A part that is not as it was written, or not of its shard."""


def write_part(job: Job, shard: Shard, table: pa.Table) -> None:
    """Writes a shard's scores. ServingError: there is no room."""
    path = job.part(shard)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    buffer = io.BytesIO()
    pq.write_table(table, buffer, use_dictionary=False)  # scores and row numbers hardly repeat
    try:
        _checksum_file(path).write_text(_checksum_line(path, buffer.getbuffer()))
        partial.write_bytes(buffer.getbuffer())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ServingError(
            f"{path} cannot be written ({error.strerror}); free some space, and give the same command again: "
            "it goes on from here"
        ) from error


def find_part(job: Job, shard: Shard) -> pa.Table | None:
    """Returns a shard's scores, or None. Logs and removes a damaged part."""
    path = job.part(shard)
    try:
        return _read(job, shard)
    except FileNotFoundError:
        return None
    except DamagedPart as error:
        logger.warning("%s is made again: %s", path, error)
        path.unlink(missing_ok=True)
        return None


def _read(job: Job, shard: Shard) -> pa.Table:
    """Reads a part and checks its bytes. FileNotFoundError: there is none."""
    path = job.part(shard)
    content = path.read_bytes()
    try:
        expected = _checksum_file(path).read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        expected = ""
    if (found := _checksum_line(path, content)) != expected:
        raise DamagedPart(
            f"its checksum is {found.split()[0]}, expected "
            f"{' '.join(expected.split()[:1]) or 'one beside it'}"
        )
    try:
        # In this thread: one of Arrow's may let go of `content` when Python is at its end already, which ends
        # the process (-6). `pq.read_table` starts one whatever it is told.
        part = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    except pa.ArrowException as error:
        raise DamagedPart(str(error)) from error
    scores = (f"score_{n}" for n in range(len(job.candidates)))
    wanted = ["row", "label", *scores, *(["slice"] if job.slice_by else [])]
    if part.column_names != wanted:
        raise DamagedPart(f"its columns are {', '.join(part.column_names)}; expected {', '.join(wanted)}")
    if not np.array_equal(part.column("row").to_numpy(), np.arange(shard.start, shard.start + shard.rows)):
        raise DamagedPart(f"it does not hold rows [{shard.start}, {shard.start + shard.rows}) once each")
    return part


def without_row(part: pa.Table, candidates: int) -> list[WithoutRow]:
    """Returns a part's ids without a row per candidate; none in parts of an earlier release."""
    found: list[WithoutRow] = json.loads((part.schema.metadata or {}).get(WITHOUT_ROW, b"[]"))
    return found or [{} for _ in range(candidates)]


def remove_partials(parts: Path, pid: int | None = None) -> None:
    """Removes unfinished files of an ended process; of all processes without one."""
    for partial in parts.glob(f"*.partial-{'*' if pid is None else pid}"):
        partial.unlink(missing_ok=True)


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.xxh3")


def _checksum_line(path: Path, content: bytes | memoryview) -> str:
    return f"XXH3_{xxhash.xxh3_64_hexdigest(content)}  {path.name}\n"
