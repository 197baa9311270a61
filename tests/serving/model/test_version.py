"""A version that is served: how it lays requests out, and how it is warmed up."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_demo
from raw_tables import raw_table
from served import Sum, engine_of
from support import rows_of

from tableside.loader.model.specs import FeatureSpec
from tableside.loader.versions.states import State
from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, Planner, Pooling, RowFormat, choose
from tableside.quant.contract import lookup_at, places_in
from tableside.serving.errors import ApiError
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.places import DenseInput
from tableside.serving.model.request import Answer, FeatureInput, Request
from tableside.serving.model.version import ServedVersion, end_ids
from tableside.serving.settings import ServerSettings

Publish = Callable[..., Any]
FEATURES = {
    "pooled": {"table": "t"},
    "half": {"table": "t", "output": "fp16"},
    "words": {"table": "t", "pooling": "none"},
}


def test_a_version_is_warmed_up_with_ids_that_its_tables_have(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and last row of raw tables and of dense ones; any id where all get the default row; none where
    each is refused."""
    tables = {
        **{name: raw_demo.TABLES[name] for name in ("strict", "old", "empty", "word", "plain")},
        "nothing": raw_demo.DemoTable(raw_demo.random_ids(0, 1), raw_demo.whole_rows(0, 8, 1)),
    }
    raw_demo.publish_raw(root, "demo", tables, [FeatureSpec(name, name, "sum", "fp32") for name in tables])
    placer = Placer(ServerSettings(), choose())
    seen: dict[str, set[int]] = {}
    look_up = Request.look_up

    def watched(self: Request, inputs: bytes) -> Answer:
        seen.setdefault(self.feature(0), set()).update(np.frombuffer(inputs, np.int64, 2).tolist())
        return look_up(self, inputs)

    monkeypatch.setattr(Request, "look_up", watched)
    served = Engine(Model(root, "demo"), ServerSettings(), placer).attach()
    assert "nothing" not in seen and seen["word"] == {0, 39} and seen["plain"] == {0, 19}
    for name in ("strict", "old"):
        index = served.segment.tables[name].row_map.index  # type: ignore[union-attr]
        assert index is not None and seen[name] == {int(index.ids[0]), int(index.ids[-1])}
        assert seen[name] <= set(tables[name].ids.tolist())
    assert len(seen["empty"]) == 1


@pytest.fixture
def version(publish: Publish, root: Path) -> ServedVersion:
    publish({"t": rows_of(10, 8)}, features=FEATURES)
    return engine_of(root, 200).attach()


def test_outputs_lie_one_after_another_in_the_order_of_the_inputs(version: ServedVersion) -> None:
    """Vectors of 8 values in 4 or 2 bytes; the request counts ids, vectors and bytes of rows."""
    inputs = [
        FeatureInput("half", 0, 3, bags=3, bag_length=1),
        FeatureInput("words", 24, 2),
        FeatureInput("pooled", 40, 2, 1, 2),
    ]
    request = version.lay_out(inputs)
    assert [(o.feature, o.at, o.bytes, o.shape) for o in request.outputs] == [
        ("half", 0, 48, (3, 8)),
        ("words", 48, 64, (2, 8)),
        ("pooled", 112, 32, (1, 8)),
    ]
    assert (request.ids, request.vectors, request.out_bytes) == (7, 6, 144)
    assert request.row_bytes == 7 * version.features["half"].table.row_bytes
    ids = np.array([1, 2, 3, 4, 5, 6, 7], np.int64)
    found = request.run(ids.tobytes())
    rows = version.segment.tables["t"]
    expected = choose().lookup(rows, ids[3:5], pooling=Pooling.NONE)
    np.testing.assert_array_equal(request.outputs[1].view(found), expected)
    expected = choose().lookup(rows, ids[5:], np.array([2], np.int32))
    np.testing.assert_array_equal(request.outputs[2].view(found), expected)
    assert request.outputs[0].view(found).dtype == np.float16


def test_masks_lie_behind_vectors_and_scores(publish: Publish, root: Path) -> None:
    """A byte for each id of the features that are asked for, and of no other; as JSON it takes as much as
    half an fp32."""
    features = {"user": {"table": "t"}, "item": {"table": "u"}, "words": {"table": "t", "pooling": "none"}}
    publish({"t": rows_of(10, 8), "u": rows_of(10, 6)}, features=features)
    version = engine_of(root, 1000).attach()
    version.scorer = Sum()
    inputs = [
        FeatureInput("user", 0, 1, 1, 1),
        FeatureInput("item", 8, 1, 1, 1),
        FeatureInput("words", 16, 2),
    ]
    request = version.lay_out(
        inputs, [DenseInput("context", 32, 1, 3)], score=True, found={"words", "user", "nothing"}
    )
    at = 8 * 4 + 6 * 4 + 2 * 8 * 4
    shown = [(o.feature, o.datatype, o.at, o.shape, o.json_bytes) for o in request.outputs[3:]]
    assert shown == [
        ("score", "FP32", at, (1,), 4),
        ("user.found", "BOOL", at + 4, (1,), 2),
        ("words.found", "BOOL", at + 5, (2,), 4),
    ]
    assert request.out_bytes == at + 7


def test_an_output_beyond_the_limit_is_refused(version: ServedVersion) -> None:
    """Before anything is planned, with both numbers."""
    with pytest.raises(
        ApiError, match=r"asks for 224 bytes of vectors; the limit is 200 \(max_response_bytes\)"
    ):
        version.lay_out([FeatureInput("words", 0, 7)])


def test_a_record_that_cannot_be_read_changes_nothing(
    publish: Publish, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on with the version that it serves, says so once, and takes the next one when the
    record is whole again."""
    publish({"t": rows_of(10, 8)})
    placer = Placer(ServerSettings(), choose())
    engine = Engine(Model(root, "demo"), ServerSettings(), placer)
    engine.swap(engine.attach())
    record = root / "demo" / "current"
    whole = record.read_text()
    record.write_text("{")
    assert [engine.changed() for _ in range(3)] == [None, None, None]
    assert engine.served().version == 1
    # pytest listens at loggers that do not propagate, too, so one record may be there twice.
    assert (
        len({id(r) for r in caplog.records if "cannot see which version of demo is live" in r.message}) == 1
    )
    record.write_text(whole)
    publish({"t": rows_of(10, 8)})
    assert engine.changed() == State(2)


def test_a_version_is_warmed_up_with_the_bags_that_its_backend_names(
    version: ServedVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each feature, first and last row; pooled ones with lengths and weights and without."""
    monkeypatch.setattr(version.backend, "warm_up_bags", (3, 5), raising=False)
    seen: list[Lookup] = []
    planner = version.backend.planner

    class Watched(Planner):
        def __init__(self, kinds: Any, threads: int) -> None:
            self.kinds, self.planner = kinds, planner(kinds, threads)

        def plan(self, places: Any, out_bytes: int = 0) -> Any:
            seen.extend(lookup_at(self.kinds, place) for place in places_in(places))
            return self.planner.plan(places, out_bytes)

    monkeypatch.setattr(version.backend, "planner", Watched)
    ServedVersion(version.segment, version.backend, version.placed).warm_up()
    pooled = [(lk.ids, lk.lengths_at is not None, lk.weights_at is not None) for lk in seen if lk.bags]
    assert {ids for ids, _, _ in pooled} == {3, 5}
    assert pooled.count((5, True, True)) == 2 and pooled.count((5, False, False)) == 3


def test_an_owner_is_warmed_up_with_ids_of_its_own() -> None:
    """A row that no id has may keep an id that another owner has; such ids are not asked for at either
    end."""
    ids = np.arange(40, dtype=np.int64) * 7
    table = raw_table(ids, np.ones((40, 32), np.float32), RowFormat.FP16, buckets=1)
    assert table.row_map is not None and table.row_map.index is not None
    index = table.row_map.index
    rows = index.find(ids)
    ends = np.setdiff1d(np.arange(index.slots), rows)
    foreign = replace(index, ids=index.ids.copy())
    foreign.ids[[0, -1]] = -1  # as if no id of this owner were in the first and the last row
    foreign.ids[ends] = -1
    chosen = end_ids(replace(table, row_map=replace(table.row_map, index=foreign)))
    assert chosen.size == 2
    assert np.isin(chosen, ids).all()
