"""Of more ids than their table's max_rows, compaction drops those used least, then the oldest."""

from pathlib import Path

import numpy as np
import pytest
from aging import IDS, at, change, check, compact_on, on, publish

from tableside.loader.deltas.compact import compact
from tableside.loader.deltas.expiry import Expiry, LivingRows, expiry_of
from tableside.loader.hot.counts import MOST, RowCounts
from tableside.loader.hot.hot import clear_hot, hot_folder
from tableside.loader.segment.stored import StoredIds
from tableside.loader.versions.states import attach_state


def test_of_too_many_ids_the_oldest_go(root: Path, tmp_path: Path) -> None:
    """Of one age those with the least ids. A load takes all."""
    model = publish(tmp_path, root, max_rows=100)
    change(model, 1, IDS[:30])
    done = compact_on(model, 2)
    assert (done.expired, done.evicted, done.rows) == (0, 300, 100)
    check(model, on(1, IDS[:30]) | on(0, np.sort(IDS[30:])[-70:]))
    assert compact(model, at(10_000)) is None
    change(model, 3, np.arange(100))
    assert compact_on(model, 4).evicted == 100
    check(model, on(3, np.arange(100)))


@pytest.mark.parametrize("most", [1, 7, 399])
def test_changed_ids_go_too_where_they_are_too_many(root: Path, tmp_path: Path, most: int) -> None:
    model = publish(tmp_path, root, max_rows=most)
    change(model, 1, IDS)
    assert compact_on(model, 2).evicted == IDS.size - most
    check(model, on(1, np.sort(IDS)[-most:]))


def test_equal_changes_give_equal_bytes(root: Path, tmp_path: Path) -> None:
    """Of two models that were loaded and changed at the same times."""
    segments = []
    for name in ("one", "other"):
        model = publish(tmp_path, root / name, ttl="10d", max_rows=200)
        change(model, 1, IDS[:30])
        compact_on(model, 2)
        change(model, 11, IDS[30:60])
        compact_on(model, 12)
        segments.append(attach_state(model))
    assert segments[0].content() == segments[1].content()
    np.testing.assert_array_equal(segments[0].tables["t"].packed, segments[1].tables["t"].packed)


@pytest.mark.usefixtures("every_table_is_large")
def test_ids_that_are_used_least_go_first(disk: Path, tmp_path: Path) -> None:
    """Where uses are counted; a row that a change wrote since has none yet, and stays."""
    model = publish(tmp_path, disk, row_format="int4", max_rows=50)
    try:
        segment = attach_state(model)
        with hot_folder(disk, "demo") as folder:
            counts = RowCounts.shared(folder, segment)
        row_map = segment.tables["t"].row_map
        assert row_map is not None
        used = np.concatenate([IDS[:20], IDS[100:160]])
        counts.tables["t"][row_map.find(used)] = 5
        counts.tables["t"][row_map.find(IDS[:20])] = MOST
        change(model, 1, IDS[300:310])
        assert compact_on(model, 2).evicted == 350
        kept = np.sort(IDS[100:160])[-20:]
        check(model, on(0, IDS[:20], kept) | on(1, IDS[300:310]))
    finally:
        clear_hot(disk, "demo", tuple)


@pytest.mark.usefixtures("every_table_is_large")
def test_a_count_that_changes_meanwhile_changes_nothing(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers go on to count while a compaction reads the rows several times."""
    model = publish(tmp_path, disk, row_format="int4", max_rows=50)
    try:
        with hot_folder(disk, "demo") as folder:
            counts = RowCounts.shared(folder, attach_state(model)).tables["t"]
        keeps = Expiry.keeps

        def counting(self: Expiry, rows: LivingRows) -> np.ndarray:
            counts[:] = np.random.default_rng(counts[0]).integers(0, MOST, counts.size)
            return keeps(self, rows)

        monkeypatch.setattr(Expiry, "keeps", counting)
        assert compact_on(model, 1).rows == 50
    finally:
        clear_hot(disk, "demo", tuple)


def test_what_goes_is_exact() -> None:
    """Whatever the blocks are, and how many of the ids have one rank."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        ids = rng.permutation(60)[: rng.integers(1, 60)].astype(np.int64) - 30
        times = rng.integers(0, 5, ids.size).astype(np.uint32) * 1000
        uses = rng.integers(0, 3, ids.size).astype(np.uint8)
        blocks = [LivingRows(ids[n::3], times[n::3], uses[n::3]) for n in range(3)]
        ttl_s, most = int(rng.integers(0, 3)) * 1500, int(rng.integers(0, 40))
        stored = StoredIds(ids.size, ttl_s=ttl_s, max_rows=most)
        found = expiry_of(stored, 4000, lambda of=blocks: of, lambda n: np.empty(n, np.int64))  # type: ignore[misc]
        rows = sorted(zip(uses.tolist(), times.tolist(), ids.tolist(), strict=True))
        young = [row for row in rows if not ttl_s or row[1] >= 4000 - ttl_s]
        left = young[len(young) - most :] if most and most < len(young) else young
        kept = np.concatenate([block.ids[found.keeps(block)] for block in blocks])
        assert sorted(kept.tolist()) == sorted(id_ for *_, id_ in left)
        assert (found.expired, found.evicted) == (ids.size - len(young), len(young) - len(left))
