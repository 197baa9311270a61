"""Partial tensors: parts of a table, dense or of raw ids, against what was written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from raw_segments import DenseTable, RawTable, publish_tables
from support import rows_of

from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.segment.stored import StoredIds, StoredTable
from tableside.loader.versions import partial
from tableside.loader.versions.partial import PartialTensor, RowsWithIds, ids_in
from tableside.loader.versions.versions import Model
from tableside.quant import QuantError, RowFormat, Source, Table, choose
from tableside.quant.rows.ids import IdIndex, RowMap, slots_for

EXTREMES = np.array([-(2**63), 2**63 - 1, -1, 0, 1, 1 << 32, -(1 << 32)], np.int64)


def random_ids(count: int, seed: int = 0) -> np.ndarray:
    """Different int64, the extremes among them, in no order."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(-(2**63), 2**63 - 1, count, endpoint=True)
    return rng.permutation(np.unique(np.concatenate([EXTREMES, drawn]))[: max(count, EXTREMES.size)])


RAW = {
    "int8 D 64: ids in the padding": (random_ids(700), 64, RowFormat.INT8, {}),
    "fp16 D 32: ids in an array": (random_ids(300), 32, RowFormat.FP16, {}),
    "one bucket": (random_ids(200), 8, RowFormat.FP32, {"buckets": 1}),
    "one id": (np.array([-1], np.int64), 8, RowFormat.FP16, {}),
    "extremes, most buckets empty": (EXTREMES, 16, RowFormat.INT4, {"buckets": 64}),
    "chunked": (np.arange(5, 800, 3, dtype=np.int64), 8, RowFormat.FP16, {"buckets": 8, "bucket_ids": 100}),
    "no id": (np.empty(0, np.int64), 8, RowFormat.FP16, {}),
}


@pytest.fixture(params=RAW)
def raw(request: pytest.FixtureRequest, root: Path) -> tuple[PartialTensor, dict[int, bytes]]:
    """A published table of raw ids with a default row, and a dictionary of what each id dequantizes to."""
    ids, dim, row_format, how = RAW[request.param]
    table = RawTable(ids, rows_of(ids.size, dim), row_format, default=np.ones(dim, np.float32), **how)
    publish_tables(root, {"t": table})
    values = quantized(table.values, row_format)
    return Model(root, "demo").tensor("t"), {int(i): v.tobytes() for i, v in zip(ids, values, strict=True)}


def quantized(values: np.ndarray, row_format: RowFormat) -> np.ndarray:
    """What values are once they were quantized and dequantized."""
    packed = np.zeros((len(values), row_format.row_bytes(values.shape[1])), np.uint8)
    choose().quantize(values, Source.FP32, row_format, packed)
    return choose().dequantize(Table(packed, row_format, values.shape[1]))


def as_dictionary(tensor: PartialTensor, rows: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for ids, values in tensor.chunks(rows):
        assert ids.dtype == np.int64 and values.dtype == np.float32 and values.shape == (ids.size, tensor.dim)
        for i, value in zip(ids, values, strict=True):
            assert int(i) not in found, f"id {i} comes twice"
            found[int(i)] = value.tobytes()
    return found


@pytest.mark.parametrize("rows", [1, 7, 1 << 16])
def test_chunks_give_every_id_once_with_its_vector(
    raw: tuple[PartialTensor, dict[int, bytes]], rows: int
) -> None:
    """Neither an empty slot nor the default row comes; each chunk but the last has as many rows as were
    asked for."""
    tensor, expected = raw
    assert as_dictionary(tensor, rows) == expected
    sizes = [ids.size for ids in tensor.id_chunks(rows)]
    assert sum(sizes) == len(expected) and all(size == rows for size in sizes[:-1])


def test_sizes_are_those_of_the_linear_tensor(raw: tuple[PartialTensor, dict[int, bytes]]) -> None:
    """fp32, whatever the rows take as they are stored."""
    tensor, expected = raw
    assert tensor.shape == (len(expected), tensor.dim) and len(tensor) == len(expected)
    assert tensor.numel() == len(expected) * tensor.dim and tensor.element_size() == 4
    assert tensor.nbytes == tensor.numpy().nbytes == 4 * tensor.numel()
    flat, raw_bytes = tensor.view(-1), tensor.view(np.uint8)
    assert flat.shape == (tensor.numel(),) and flat.nbytes == tensor.nbytes
    assert raw_bytes.shape == (len(expected), 4 * tensor.dim) and raw_bytes.element_size() == 1
    assert raw_bytes.nbytes == flat.view(np.uint8).numel() == tensor.nbytes


@pytest.mark.parametrize("piece_rows", [3, 64, 1 << 16])
@pytest.mark.drawn(9)
def test_a_part_is_that_part_of_the_whole(
    raw: tuple[PartialTensor, dict[int, bytes]], piece_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it begins, also inside a bucket that is larger than the pieces in which rows are passed."""
    monkeypatch.setattr(partial, "PIECE_ROWS", piece_rows)
    tensor, _ = raw
    whole, flat = tensor.numpy(), tensor.numpy().reshape(-1)
    rng = np.random.default_rng(piece_rows)
    for _ in range(20):
        start, stop = np.sort(rng.integers(0, len(tensor), 2, endpoint=True)).tolist()
        part = tensor.narrow(0, start, stop - start)
        np.testing.assert_array_equal(part.numpy(), whole[start:stop])
        start, stop = np.sort(rng.integers(0, flat.size, 2, endpoint=True)).tolist()
        np.testing.assert_array_equal(
            tensor.view(-1).narrow(0, start, stop - start).numpy(), flat[start:stop]
        )
    if len(tensor) > 3:
        again = tensor.narrow(0, 1, len(tensor) - 1).narrow(0, 1, 2)
        np.testing.assert_array_equal(np.asarray(again), whole[2:4])
        np.testing.assert_array_equal(tensor.narrow(0, -2, 2).numpy(), whole[-2:])


def test_bytes_and_linear_views_are_of_the_same_values(raw: tuple[PartialTensor, dict[int, bytes]]) -> None:
    """As torch views a contiguous tensor, and back to rows."""
    tensor, _ = raw
    whole = tensor.numpy()
    assert tensor.view(np.uint8).numpy().tobytes() == whole.tobytes()
    linear = tensor.view(-1).view(np.uint8)
    part = linear.narrow(0, linear.numel() // 3, linear.numel() // 2)
    assert part.numpy().tobytes() == whole.tobytes()[linear.numel() // 3 :][: linear.numel() // 2]
    again = tensor.view(-1).view(len(tensor), tensor.dim)
    np.testing.assert_array_equal(again.numpy(), whole)


def test_packed_rows_are_the_stored_bytes(raw: tuple[PartialTensor, dict[int, bytes]]) -> None:
    """Those of the rows that ids have, in the order of the tensor."""
    tensor, expected = raw
    packed = tensor.packed()
    table = Table(packed, RowFormat.parse(tensor.rows.stored.row_format), tensor.dim)
    assert packed.shape == (len(expected), table.row_bytes)
    np.testing.assert_array_equal(choose().dequantize(table), tensor.numpy())


def test_torch_takes_what_numpy_gives_and_its_dtypes(root: Path) -> None:
    torch = pytest.importorskip("torch")
    publish_tables(root, {"t": RawTable(random_ids(50), rows_of(50, 8), RowFormat.FP32)})
    tensor = Model(root, "demo").tensor("t")
    whole = torch.from_numpy(tensor.numpy())
    viewed = torch.from_numpy(tensor.view(torch.uint8).numpy())
    assert torch.equal(viewed, whole.view(torch.uint8)) and tensor.view(torch.float32) is tensor
    assert (tensor.numel(), tensor.nbytes, tensor.element_size()) == (
        whole.numel(),
        whole.nbytes,
        whole.element_size(),
    )
    assert torch.equal(torch.from_numpy(tensor.narrow(0, 7, 9).numpy()), whole.narrow(0, 7, 9))


def test_the_example_of_the_documentation(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is written, on another folder."""
    ids = random_ids(30)
    publish_tables(root, {"user": RawTable(ids, rows_of(30, 8), RowFormat.FP32)}, "ads")
    text = (Path(__file__).parents[3] / "docs" / "tables.md").read_text()
    code = text.split("```python\n")[1].split("```")[0].replace("/dev/shm/tableside", str(root))
    exec(compile(code, "docs/tables.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("(30, 8) 960\n") and len(printed.splitlines()) == 2


# ---- dense tables ----


def test_a_plain_table(publish: Callable[..., object], root: Path) -> None:
    """Ids are row numbers; packed rows are the segment's own memory."""
    values = rows_of(300, 16)
    publish({"t": values})
    publish({"t": values[:10]})
    tensor = Model(root, "demo").tensor("t", version=1)
    np.testing.assert_array_equal(tensor.numpy(), quantized(values, RowFormat.INT8))
    assert np.concatenate(list(tensor.id_chunks(7))).tolist() == list(range(300))
    assert (
        np.shares_memory(tensor.packed(), tensor.rows.table.packed)
        and len(Model(root, "demo").tensor("t")) == 10
    )


def test_a_table_with_a_policy_and_a_first_id(root: Path) -> None:
    """The default row is no part of it, and ids begin where the table does."""
    values = rows_of(40, 8)
    publish_tables(
        root, {"t": DenseTable(values, RowFormat.FP32, default=np.ones(8, np.float32), first=1000)}
    )
    tensor = Model(root, "demo").tensor("t")
    np.testing.assert_array_equal(tensor.numpy(), values)
    assert np.concatenate(list(tensor.narrow(0, 5, 20).id_chunks(6))).tolist() == list(range(1005, 1025))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda t: t.narrow(1, 0, 2), "expected dim 0"),
        (lambda t: t.narrow(-1, 0, 2), "expected dim 0"),
        (lambda t: t.narrow(0, 3, 8), r"outside of \[0, 10\)"),
        (lambda t: t.narrow(0, -11, 1), r"outside of \[0, 10\)"),
        (lambda t: t.narrow(0, 2, -1), r"outside of \[0, 10\)"),
        (lambda t: t.view(5, 16), "expected \\[-1\\], whole rows"),
        (lambda t: t.view(-1, -1), "expected \\[-1\\], whole rows"),
        (lambda t: t.view(-1).view(5, 16), "expected \\[-1\\], whole rows"),
        (lambda t: t.view(-1).view(11, 8), "expected \\[-1\\], whole rows"),
        (lambda t: t.view(-1).narrow(0, 3, 16).view(2, 8), "expected \\[-1\\], whole rows"),
        (lambda t: t.view(np.float16), "expected uint8"),
        (lambda t: t.view(np.uint8).view(np.float32), "expected uint8"),
        (lambda t: t.view(-1).packed(), "expected rows"),
        (lambda t: next(t.view(np.uint8).chunks()), "expected rows"),
        (lambda t: next(t.chunks(0)), "expected 1 or more"),
    ],
)
@pytest.mark.drawn(7)
def test_parts_and_views_that_are_not_there_are_refused(
    ask: Callable[[PartialTensor], object], message: str, publish: Callable[..., object], root: Path
) -> None:
    publish({"t": rows_of(10, 8)})
    with pytest.raises(QuantError, match=message):
        ask(Model(root, "demo").tensor("t"))


def test_an_array_cannot_share_what_is_not_there(publish: Callable[..., object], root: Path) -> None:
    publish({"t": rows_of(10, 8)})
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(Model(root, "demo").tensor("t"), copy=False)


def test_a_table_that_is_not_there(publish: Callable[..., object], root: Path) -> None:
    publish({"t": rows_of(10, 8), "u": rows_of(10, 8)})
    with pytest.raises(VersionError, match=r"no table 'x'; expected one of: t, u"):
        Model(root, "demo").tensor("x")
    with pytest.raises(VersionError, match="version 7 is not published"):
        Model(root, "demo").tensor("t", 7)


# ---- how little is read ----


class CountedIds:
    """The ids of an index, which count how many of them are read."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids, self.read = ids, 0

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        self.read += len(rows)
        return self.ids[rows]


def counted(root: Path, buckets: int) -> tuple[PartialTensor, CountedIds]:
    ids = random_ids(2000)
    publish_tables(root, {"t": RawTable(ids, rows_of(2000, 8), RowFormat.FP16, buckets)})
    segment = Model(root, "demo").attach()
    table, (stored,) = segment.tables["t"], segment.header.tables
    assert table.row_map is not None and table.row_map.index is not None
    index = table.row_map.index
    ids_read = CountedIds(index.ids)
    watched = IdIndex(index.directory, index.pilots, ids_read, index.buckets)  # type: ignore[arg-type]
    row_map = RowMap(table.row_map.count, None, watched)
    rows = RowsWithIds(stored, Table(table.packed, table.row_format, table.dim, row_map))
    return PartialTensor(rows, 0, rows.count), ids_read


def test_sizes_and_narrow_read_nothing(root: Path) -> None:
    tensor, ids = counted(root, 16)
    part = tensor.narrow(0, 1500, 10).view(-1)
    assert (part.numel(), part.nbytes, part.shape, ids.read) == (80, 320, (80,), 0)


def test_a_part_reads_its_own_bucket(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket, not those before it: by the directory."""
    monkeypatch.setattr(partial, "PIECE_ROWS", 64)
    tensor, ids = counted(root, 16)
    part = tensor.narrow(0, 1500, 10)
    expected = tensor.numpy()[1500:1510]
    ids.read = 0
    np.testing.assert_array_equal(part.numpy(), expected)
    assert 0 < ids.read < 2000 / 16 + 3 * 64


def test_a_large_bucket_is_counted_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all for a part that begins with it; parts after the first that is counted read only what
    they begin in."""
    monkeypatch.setattr(partial, "PIECE_ROWS", 64)
    tensor, ids = counted(root, 1)
    tensor.narrow(0, 0, 5).numpy()
    assert 0 < ids.read <= 64
    tensor.narrow(0, 10, 1).numpy()
    assert ids.read > 1900
    ids.read = 0
    tensor.narrow(0, 1900, 5).numpy()
    assert 0 < ids.read <= 2 * 64


# ---- an index that lies ----


@pytest.mark.parametrize("ids", [0, 1, 63, 64, 65, 66, 127, 128, 129, 10_000])
def test_slots_say_how_many_ids_a_bucket_has(ids: int) -> None:
    assert ids_in(np.array([slots_for(ids)])).tolist() == [ids]


def test_an_index_with_other_ids_than_it_says_is_refused(root: Path) -> None:
    """By its header, and by a slot whose id belongs elsewhere: never an endless scan, never a row too
    many."""
    publish_tables(root, {"t": RawTable(random_ids(100), rows_of(100, 8), RowFormat.FP16, 4)})
    segment = Model(root, "demo").attach()
    table, (stored,) = segment.tables["t"], segment.header.tables
    assert table.row_map is not None and table.row_map.index is not None
    index = table.row_map.index
    fewer = StoredTable(**{**vars(stored), "ids": StoredIds(99, index=stored.ids.index)})  # type: ignore[union-attr]
    with pytest.raises(SegmentError, match="100 ids by its directory, 99 by its header"):
        RowsWithIds(fewer, table)._before  # noqa: B018
    same = IdIndex(index.directory, index.pilots, np.full(index.slots, index.ids[0]), index.buckets)
    rows = RowsWithIds(stored, Table(table.packed, table.row_format, 8, RowMap(100, None, same)))
    with pytest.raises(SegmentError, match="rows less than ids"):
        list(rows.numbers(0, 100))
