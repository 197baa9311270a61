"""Tables of raw ids in plain files: DynamicEmb's dumps of several ranks and HugeCTR's sparse models, and what
is wrong with them.

The files are written as NVIDIA/recsys-examples (corelib/dynamicemb/dynamicemb/key_value_table.py,
_dump_table) and NVIDIA-Merlin/HugeCTR (HugeCTR/src/hps/modelloader.cpp reads them) do: numpy's tobytes of
int64 keys and fp32 vectors.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from keyed_tables import ids_of, read, small_pieces
from support import rows_of

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.errors import CheckpointError

DIM = 6


def dump(
    folder: Path,
    table: str,
    ids: np.ndarray,
    values: np.ndarray,
    ranks: int,
    scores: np.ndarray | None = None,
    strategy: str = "",
) -> Path:
    """A DynamicEmb dump: ids go to ranks as they do there, id % ranks; scores and optimizer states lie
    beside them."""
    scores = np.zeros(len(ids), np.int64) if scores is None else scores
    folder.mkdir(exist_ok=True, parents=True)
    for rank in range(ranks):
        mine = ids % ranks == rank
        name = f"rank_{rank}.world_size_{ranks}"
        (folder / f"{table}_emb_keys.{name}").write_bytes(ids[mine].tobytes())
        (folder / f"{table}_emb_values.{name}").write_bytes(values[mine].tobytes())
        (folder / f"{table}_emb_scores.{name}").write_bytes(scores[mine].tobytes())
        (folder / f"{table}_emb_opt_values.{name}").write_bytes(
            np.zeros((mine.sum(), DIM), np.float32).tobytes()
        )
    said = {"opt_type": "adam", "dist_type": "roundrobin", "evict_strategy": strategy}
    (folder / f"{table}_opt_args.json").write_text(json.dumps(said if strategy else {}))
    return folder


def sparse_model(folder: Path, ids: np.ndarray, values: np.ndarray) -> Path:
    """A sparse model of HugeCTR, of a localized embedding: with slot ids."""
    folder.mkdir(parents=True)
    (folder / "key").write_bytes(ids.tobytes())
    (folder / "emb_vector").write_bytes(values.tobytes())
    (folder / "slot_id").write_bytes(np.zeros(len(ids), np.uint64).tobytes())
    return folder


IDS, VALUES = ids_of(57), rows_of(57, DIM)


# ---- DynamicEmb ----


@pytest.mark.parametrize("ranks", [1, 2, 5, 100])
def test_a_dump_is_what_was_dumped(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank after rank, over several pieces and blocks; of 100 ranks some have no ids at all."""
    small_pieces(monkeypatch)
    with open_checkpoint(dump(tmp_path / "dump", "user", IDS, VALUES, ranks)) as found:
        assert dict(found.keyed_tables) == {"user": None}
        table = found.keyed("user")
        got = read(table)
        order = np.concatenate([np.flatnonzero(IDS % ranks == rank) for rank in range(ranks)])
        assert (table.rows, table.dim, table.source.label) == (57, DIM, "fp32") and table.pieces > 1
        np.testing.assert_array_equal(got.ids, IDS[order])
        np.testing.assert_array_equal(got.values, VALUES[order])
        for row in (0, 30, 56):
            rank = IDS[order[row]] % ranks
            assert f"user_emb_keys.rank_{rank}.world_size_{ranks}" in table.where(row)


def test_collections_are_sub_folders(tmp_path: Path) -> None:
    """As DynamicEmbDump writes them (dump_load.py): a folder for each collection of tables."""
    dump(tmp_path / "model.ebc", "user_emb_keys", IDS, VALUES, 2)  # a name like the files' own
    dump(tmp_path / "model.other", "item", IDS[:9], VALUES[:9], 2)
    _without("user_emb_keys_emb_keys.rank_1.world_size_2")(
        dump(tmp_path / "broken", "user_emb_keys", IDS, VALUES, 2)
    )
    with pytest.raises(
        CheckpointError, match=r"broken/user_emb_keys_emb_keys\.rank_1\.world_size_2 is missing"
    ):
        open_checkpoint(tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken")
    with open_checkpoint(tmp_path) as found:
        assert dict(found.keyed_tables) == {"model.ebc/user_emb_keys": None, "model.other/item": None}
        assert len(read(found.keyed("model.other/item")).ids) == 9


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _cut(name: str, count: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - count)


def _stretch(folder: Path, ranks: int) -> None:
    """Files of vectors become sparse ones of hundreds of GiB, as many bytes for each key."""
    for rank in range(ranks):
        keys = (folder / f"user_emb_keys.rank_{rank}.world_size_{ranks}").stat().st_size
        os.truncate(folder / f"user_emb_values.rank_{rank}.world_size_{ranks}", keys << 31)


KEYS, SUM = "user_emb_keys.rank_1.world_size_3", "user_emb_values.rank_1.world_size_3"
DUMP_LIES: list[tuple[Callable[[Path], object], str]] = [
    (
        _without("user_emb_keys.rank_2.world_size_3"),
        "rank_2.world_size_3 is missing; expected files of all 3 ranks of 'user'",
    ),
    (_without(SUM), f"{SUM} is missing"),
    (_cut(KEYS, 3), "bytes are no whole number of int64 keys"),
    (_cut(KEYS, 8), rf"fp32 values are no whole number, from 1, for each of the [\d]+ keys of .*{KEYS}"),
    (_cut(SUM, 4), "fp32 values are no whole number"),
    (lambda f: (f / SUM).write_bytes(b""), "fp32 values are no whole number"),
    (lambda f: (f / KEYS).write_bytes(b""), "for each of the 0 keys"),
    (
        lambda f: (f / SUM).write_bytes((f / SUM).read_bytes() * 2),
        f"vectors of 12 values, in .*rank_0.* they have {DIM}",
    ),
    (lambda f: dump(f, "user", IDS, VALUES, 2), "was dumped by 2 ranks and by 3"),
    (
        lambda f: (f / "user_emb_keys.rank_3.world_size_3").write_bytes(b""),
        "has a file of rank 3, of 3 ranks",
    ),
    (lambda f: ((f / KEYS).unlink(), os.mkfifo(f / KEYS)), f"{KEYS}: a file of the checkpoint is a FIFO"),
    (lambda f: _stretch(f, 3), "'user' has 57 rows of 4,294,967,296 values; expected at most 4,194,304"),
    (lambda f: [p.write_bytes(b"") for p in f.glob("*.rank_*")], "'user' has no keys in any of its 3 files"),
]


@pytest.mark.parametrize(("lie", "message"), DUMP_LIES, ids=[message[:40] for _, message in DUMP_LIES])
def test_a_dump_that_lies_is_refused(lie: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """Missing ranks, truncated files, sizes that do not fit: the file is named, and both numbers."""
    folder = dump(tmp_path / "dump", "user", IDS, VALUES, 3)
    lie(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).keyed("user")


LRU, AGES_NS = "EvictStrategy.KLru", np.arange(57) * 1_500_000_000 - 2


def test_scores_of_the_least_recently_used_are_ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole seconds, of every block; one that a GPU's timer puts behind the dump is 0."""
    small_pieces(monkeypatch)
    with open_checkpoint(dump(tmp_path / "lru", "user", IDS, VALUES, 3, AGES_NS, LRU)) as found:
        table = found.keyed("user")
        assert table.has_ages
        of = dict(zip(IDS.tolist(), np.maximum(AGES_NS // 10**9, 0).tolist(), strict=True))
        for piece in range(table.pieces):
            for block in table.blocks(piece):
                assert table.ages_s(block.rows).tolist() == [of[i] for i in block.ids.tolist()]


@pytest.mark.parametrize("strategy", ["EvictStrategy.KLfu", "EvictStrategy.KCustomized", ""])
def test_other_scores_are_no_ages(strategy: str, tmp_path: Path) -> None:
    """Counts of uses, of two words a row where a dump has them, and steps."""
    folder = dump(tmp_path / "dump", "user", IDS, VALUES, 1, np.arange(57), strategy)
    (folder / "user_emb_scores.rank_0.world_size_1").write_bytes(bytes(57 * 16))
    with open_checkpoint(folder) as found:
        assert not found.keyed("user").has_ages


SCORES = "user_emb_scores.rank_1.world_size_3"


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (
            _cut(SCORES, 8),
            rf"{SCORES}: [\d]+ bytes; expected [\d]+, an int64 score for each of the [\d]+ keys",
        ),
        (_without(SCORES), f"{SCORES} is missing; expected files of all 3 ranks of 'user'"),
        (lambda f: (f / "user_opt_args.json").write_text("{"), "expected the JSON that DynamicEmb writes"),
        (lambda f: (f / "user_opt_args.json").write_text("[" * 10**5), "expected the JSON that"),
        (lambda f: (f / "user_opt_args.json").write_bytes(b"\xff"), "expected the JSON that"),
    ],
)
def test_ages_that_lie_are_refused(lie: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", "user", IDS, VALUES, 3, AGES_NS, LRU)
    lie(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).keyed("user")


def test_scores_alone_are_no_table(tmp_path: Path) -> None:
    """Nor scores that lie beside a dump of other ranks, whose rows have no ages then."""
    folder = dump(tmp_path / "dump", "user", IDS, VALUES, 1, AGES_NS, "EvictStrategy.KLfu")
    (folder / "other_emb_scores.rank_0.world_size_1").write_bytes(b"")
    (folder / "user_emb_scores.rank_0.world_size_4").write_bytes(b"")
    with open_checkpoint(folder) as found:
        assert dict(found.keyed_tables) == {"user": None} and len(read(found.keyed("user")).ids) == 57


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    """With what is there; as a table of row numbers, with what model.toml should say."""
    found = open_checkpoint(dump(tmp_path / "dump", "user", IDS, VALUES, 1))
    with pytest.raises(CheckpointError, match="there is no table 'item'; a DynamicEmb dump has: user"):
        found.keyed("item")
    with pytest.raises(CheckpointError, match="leave id_key of 'user' out"):
        found.keyed("user", "ids")
    with pytest.raises(CheckpointError, match="the rows of 'user' are found by ids; add ids = \"raw\""):
        found.matrix("user")


# ---- HugeCTR ----


def test_a_sparse_model_is_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called after its folder."""
    small_pieces(monkeypatch)
    with open_checkpoint(sparse_model(tmp_path / "wdl0_sparse_2000.model", IDS, VALUES)) as found:
        assert dict(found.keyed_tables) == {"wdl0_sparse_2000.model": None}
        got = read(found.keyed("wdl0_sparse_2000.model"))
    np.testing.assert_array_equal(got.ids, IDS)
    np.testing.assert_array_equal(got.values, VALUES)


def test_a_folder_of_sparse_models(tmp_path: Path) -> None:
    """Each is called by its path; other files and folders are left alone."""
    sparse_model(tmp_path / "1" / "wdl0.model", IDS, VALUES)
    sparse_model(tmp_path / "1" / "wdl1.model", IDS[:4], VALUES[:4])
    sparse_model(tmp_path / "deep.model", IDS[:1], VALUES[:1])
    (tmp_path / "1" / "wdl_dense.model").write_bytes(b"dense")
    (tmp_path / "empty").mkdir()
    with open_checkpoint(tmp_path) as found:
        assert dict(found.keyed_tables) == dict.fromkeys(["1/wdl0.model", "1/wdl1.model", "deep.model"])
        np.testing.assert_array_equal(read(found.keyed("1/wdl1.model")).values, VALUES[:4])


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (_cut("key", 8), "fp32 values are no whole number, from 1, for each of the 56 keys"),
        (_cut("emb_vector", 4), "341 fp32 values are no whole number, from 1, for each of the 57 keys"),
        (_cut("key", 1), "bytes are no whole number of int64 keys"),
        (_without("emb_vector"), "a folder with neither"),
    ],
)
def test_a_sparse_model_that_lies_is_refused(
    lie: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    """Truncated, or half of it is missing."""
    folder = sparse_model(tmp_path / "m", IDS, VALUES)
    lie(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).keyed("m")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Not SIGBUS, and not other rows: values are read, never mapped."""
    folder = sparse_model(tmp_path / "m", IDS, VALUES)
    with open_checkpoint(folder) as found:
        table = found.keyed("m")
        _cut("emb_vector", 24)(folder)
        with pytest.raises(CheckpointError, match=r"emb_vector.*truncated while it was read"):
            read(table)
