"""Rows that come with ages, as those of DynamicEmb's dumps do. Others are as old as their load."""

from pathlib import Path

import numpy as np
import pytest
from aging import DAY, IDS, VALUES, at, clock, days_of

from tableside.loader.deltas.compact import compact
from tableside.loader.load.load import Loaded, load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

RANKS = 3


def dump(folder: Path, ages_s: np.ndarray, strategy: str = "EvictStrategy.KLru") -> None:
    """What DynamicEmb writes of a table `t` (tests/loader/checkpoint/test_keyed_folders.py)."""
    for rank in range(RANKS):
        mine, name = rank == IDS % RANKS, f"rank_{rank}.world_size_{RANKS}"
        for item, values in (("keys", IDS), ("values", VALUES), ("scores", ages_s.astype(np.int64) * 10**9)):
            (folder / f"t_emb_{item}.{name}").write_bytes(values[mine].tobytes())
    (folder / "t_opt_args.json").write_text(f'{{"evict_strategy": "{strategy}"}}')


def publish(folder: Path, root: Path, day: float, **said: object) -> Loaded:
    table = {"key": "t", "ids": "raw", "missing": "zero", **said}
    spec = parse_model({"name": "demo", "checkpoint": ".", "tables": {"t": table}}, folder)
    return load(spec, root, LoadSettings(clock=lambda: clock(day)))


AGES_S = np.arange(IDS.size) * (DAY // 8)


def test_rows_are_as_old_as_their_scores_say(root: Path, tmp_path: Path) -> None:
    """Counted from the load, as DynamicEmb counts from its own; so a ttl is that of the training."""
    dump(tmp_path, AGES_S)
    loaded = publish(tmp_path, root, 100, ttl="30d")
    assert loaded.header.source["aged"] == ["t"]
    model = Model(root, "demo")
    expected = dict(zip(IDS.tolist(), (100 - AGES_S / DAY).tolist(), strict=True))
    assert days_of(attach_state(model)) == expected
    done = compact(model, at(100))
    assert done is not None and done.expired == IDS.size - 241
    assert days_of(attach_state(model)) == {id_: day for id_, day in expected.items() if day >= 70}


def test_an_id_that_comes_twice_has_the_age_of_its_row(root: Path, tmp_path: Path) -> None:
    dump(tmp_path, AGES_S)
    for item, more in (("keys", IDS[:9]), ("values", VALUES[:9]), ("scores", np.zeros(9, np.int64))):
        path = tmp_path / f"t_emb_{item}.rank_2.world_size_{RANKS}"
        path.write_bytes(path.read_bytes() + more.tobytes())
    publish(tmp_path, root, 100, ttl="30d", duplicates="last")
    expected = dict(zip(IDS.tolist(), (100 - AGES_S / DAY).tolist(), strict=True))
    assert days_of(attach_state(Model(root, "demo"))) == expected | dict.fromkeys(IDS[:9].tolist(), 100)


def test_ages_beyond_1970_are_cut(root: Path, tmp_path: Path) -> None:
    dump(tmp_path, np.full(IDS.size, 9 * 10**9))
    publish(tmp_path, root, 0, max_rows=9)
    assert set(days_of(attach_state(Model(root, "demo"))).values()) == {-clock(0) / DAY}


@pytest.mark.parametrize("strategy", ["EvictStrategy.KLfu", "EvictStrategy.KCustomized"])
def test_other_scores_are_not_read(root: Path, tmp_path: Path, strategy: str) -> None:
    dump(tmp_path, AGES_S, strategy)
    loaded = publish(tmp_path, root, 7, ttl="30d")
    assert "aged" not in loaded.header.source
    assert set(days_of(attach_state(Model(root, "demo"))).values()) == {7}


def test_a_table_without_a_ttl_reads_no_scores(root: Path, tmp_path: Path) -> None:
    dump(tmp_path, AGES_S)
    loaded = publish(tmp_path, root, 7)
    assert "aged" not in loaded.header.source and loaded.header.format_version == 2
