"""Rows of a table on a disk, beside RocksDB and LMDB with the same rows, batches and disk.

    python benchmarks/disk_stores.py                  # 5 M int8 rows below build/; some two minutes
    python benchmarks/disk_stores.py --folder /mnt/ssd

Keys are row numbers, 8 bytes, and values packed rows, loaded in the keys' order. RocksDB reads through the
page cache, as the others do, without compression, with bloom filters; a batch is one call for many keys. LMDB
reads a batch in one transaction. Cold: the page cache has forgotten the files; warm: all rows were read once.
Every row is compared. Stores take turns.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import rocksdict
from common import report
from disk_rows import TABLE, drop, forget, options_of
from make_model import publish_random

from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model

ROWS, DIM, BATCH, ROUNDS, SECONDS = 5_000_000, 64, 1000, 3, 1.0
COLD_ROWS = 10_000  # a tenth of the pages
_AT_ONCE = 100_000  # rows that are written together

Read = Callable[[np.ndarray], np.ndarray]  # row numbers, ascending -> packed rows


def keys_of(ids: np.ndarray) -> list[bytes]:
    """Big-endian, so that they sort as numbers do."""
    text = ids.astype(">u8").tobytes()
    return [text[8 * n : 8 * n + 8] for n in range(ids.size)]


def rocksdb_options() -> Any:
    options, blocks = rocksdict.Options(raw_mode=True), rocksdict.BlockBasedOptions()
    blocks.set_bloom_filter(10, False)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    return options


def fill_rocksdb(folder: Path, packed: np.ndarray) -> None:
    store = rocksdict.Rdict(str(folder), rocksdb_options())
    for first in range(0, ROWS, _AT_ONCE):
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys_of(np.arange(first, first + _AT_ONCE)), packed[first:], strict=False):
            batch.put(key, row.tobytes())
        store.write(batch)
    store.flush()
    store.compact_range(None, None)
    store.close()


def fill_lmdb(folder: Path, packed: np.ndarray) -> None:
    with lmdb.open(str(folder), map_size=8 << 30) as store:
        for first in range(0, ROWS, _AT_ONCE):
            with store.begin(write=True) as writing:
                for key, row in zip(
                    keys_of(np.arange(first, first + _AT_ONCE)), packed[first:], strict=False
                ):
                    writing.put(key, row.tobytes(), append=True)


@contextmanager
def of_rocksdb(folder: Path) -> Iterator[Read]:
    store: Any = rocksdict.Rdict(str(folder), rocksdb_options(), access_type=rocksdict.AccessType.read_only())
    yield lambda ids: np.frombuffer(b"".join(store[keys_of(ids)]), np.uint8)
    store.close()


@contextmanager
def of_lmdb(folder: Path) -> Iterator[Read]:
    with lmdb.open(str(folder), readonly=True, readahead=False) as store:

        def read(ids: np.ndarray) -> np.ndarray:
            with store.begin() as reading, reading.cursor() as cursor:
                return np.frombuffer(b"".join(row for _, row in cursor.getmulti(keys_of(ids))), np.uint8)

        yield read


@contextmanager
def of_ours(segment: Segment) -> Iterator[Read]:
    reader, row_bytes = segment.readers[TABLE], segment.header.tables[0].row_bytes

    def read(ids: np.ndarray) -> np.ndarray:
        out, state = np.empty((ids.size, row_bytes), np.uint8), np.zeros(ids.size, np.uint8)
        reader(ids, out, state, None)
        assert not state.any()
        return out.reshape(-1)

    yield read


def rate(read: Read, packed: np.ndarray, rng: np.random.Generator, state: str) -> float:
    """Rows a second of batches of uniform ids. Where pages are cold, of a few: those that come stay."""
    rows, spent = 0, 0.0
    while spent < SECONDS if state == "warm" else rows < COLD_ROWS:
        ids = np.unique(rng.integers(0, ROWS, BATCH))
        began = time.perf_counter()
        found = read(ids)
        spent += time.perf_counter() - began
        assert (found == packed[ids].reshape(-1)).all()
        rows += ids.size
    return rows / spent


def main() -> None:
    options = options_of(__doc__)
    root, rng = options.folder / "disk-stores", np.random.default_rng(1)
    folders = {name: root / name for name in ("rocksdb", "lmdb")}
    try:
        publish_random(root / "ours", "m", {TABLE: (ROWS, DIM, "int8")})
        segment = Model(root / "ours", "m").attach(verify="header")
        packed = segment.tables[TABLE].packed.copy()
        opened: dict[str, Callable[[], AbstractContextManager[Read]]] = {
            "ours": partial(of_ours, segment),
            "rocksdb": partial(of_rocksdb, folders["rocksdb"]),
            "lmdb": partial(of_lmdb, folders["lmdb"]),
        }
        for name, fill in (("rocksdb", fill_rocksdb), ("lmdb", fill_lmdb)):
            print(f"filling {name}", flush=True)
            fill(folders[name], packed)
        rates: dict[tuple[str, str], list[float]] = {}
        for _ in range(ROUNDS):
            for name in ("ours", "rocksdb", "lmdb"):
                for state in ("cold", "warm"):
                    if state == "cold" and name == "ours":
                        forget(segment.files[1].path, segment)
                    elif state == "cold":
                        for path in folders[name].iterdir():
                            drop(path)
                    with opened[name]() as read:
                        for first in range(0, ROWS if state == "warm" else 0, _AT_ONCE):
                            read(np.arange(first, first + _AT_ONCE))
                        rates.setdefault((state, name), []).append(rate(read, packed, rng, state))
        rows = []
        for state in ("cold", "warm"):
            found = {name: statistics.median(rates[state, name]) for name in ("ours", "rocksdb", "lmdb")}
            of = {f"{name}_krows_s": value / 1e3 for name, value in found.items()}
            ratios = {
                f"over_{name}": statistics.median(
                    a / b for a, b in zip(rates[state, "ours"], rates[state, name], strict=True)
                )
                for name in ("rocksdb", "lmdb")
            }
            rows.append({"pages": state, **of, **ratios})
        versions = {name: version(name) for name in ("rocksdict", "lmdb")}
        report("disk_stores", f"{BATCH} of {ROWS:,} rows on a disk, uniform", rows, **versions)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
