"""The library for programs in C reads the rows that Python reads, and refuses by name what cannot be."""

import ctypes
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference import unpack
from safetensors.torch import save_file

import tableside
from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment import layout
from tableside.loader.segment.header import PRELUDE, checksum
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat

TOP = Path(__file__).parents[2]
PACKAGE = Path(str(tableside.__file__)).parent
LIBRARY = Path(os.environ.get("SANITIZED", PACKAGE.parent)) / "tableside" / "libtableside.abi3.so"
ROWS, DIM = 700, 96
TYPES = [torch.float32, torch.float16, torch.bfloat16]


class Shape(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int64), ("rows", ctypes.c_int64), ("dim", ctypes.c_int64)]


C = ctypes.CDLL(str(LIBRARY))
C.tableside_attach.restype = C.tableside_detach.restype = ctypes.c_void_p
C.tableside_gather.restype = ctypes.c_int64


class Attached:
    """A table that the C library attached. LookupError: the text that it refused with."""

    def __init__(self, root: Path | str, table: str = "ngram", model: str = "lm") -> None:
        self.shape, error = Shape(), ctypes.create_string_buffer(256)
        names = str(root).encode(), model.encode(), table.encode()
        found = C.tableside_attach(*names, ctypes.byref(self.shape), error, ctypes.c_size_t(len(error)))
        if found is None:
            raise LookupError(error.value.decode())
        self._table = ctypes.c_void_p(found)

    def gather(
        self, ids: Any, dtype: torch.dtype = torch.float32, threads: int = 1
    ) -> tuple[int, torch.Tensor]:
        """Returns what the call returned, and the vectors; -1 where nothing was written."""
        wanted: NDArray[np.int64] = np.ascontiguousarray(ids, np.int64)
        out = torch.full((len(wanted), self.shape.dim), -1.0, dtype=dtype)
        return self.call(wanted, len(wanted), out, TYPES.index(dtype), threads), out

    def call(self, ids: NDArray[np.int64], n: int, out: torch.Tensor, of: int, threads: int) -> int:
        places = ctypes.c_void_p(ids.ctypes.data), ctypes.c_int64(n), ctypes.c_void_p(out.data_ptr())
        return int(C.tableside_gather(self._table, *places, of, threads))

    def __del__(self) -> None:
        C.tableside_detach(getattr(self, "_table", None))


def publish(root: Path, row_format: str = "int8", seed: int = 0, **more: Any) -> torch.Tensor:
    """Publishes a version of model "lm" with the tables "small" and "ngram"; returns what the latter says."""
    values = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))
    root.mkdir(exist_ok=True)
    path = root / f"{seed}.safetensors"
    save_file({"ngram": values, "small": values[:3].clone()}, path)
    tables = {
        "small": {"key": "small", "row_format": "fp32"},
        "ngram": {"key": "ngram", "row_format": row_format},
    }
    tables["ngram"] |= more
    features = {name: {"table": name, "pooling": "none"} for name in tables}
    told = {"name": "lm", "checkpoint": str(path), "tables": tables, "features": features}
    load(parse_model(told, root), root)
    table = Model(root, "lm").attach().tables["ngram"]
    says: torch.Tensor = unpack(torch.from_numpy(table.packed.copy()), table.row_format, DIM)
    return says


@pytest.fixture(params=["in the segment", "in a file"])
def anywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tables lie in the segment, or each large one in a file of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in a file":
            patch.setattr(layout, "LARGE_PAGES", 0)
        yield


@pytest.mark.parametrize("row_format", [f.label for f in RowFormat])
@pytest.mark.drawn(9)
def test_rows_are_those_that_python_reads(root: Path, row_format: str, anywhere: None) -> None:
    """Of every type, at any address, on one thread and on several."""
    expected = publish(root, row_format)
    table = Attached(root)
    assert (table.shape.version, table.shape.rows, table.shape.dim) == (1, ROWS, DIM)
    ids = np.random.default_rng(0).integers(0, ROWS, 6000)
    ids[:2] = 0, ROWS - 1
    for dtype in TYPES:
        for n, threads in ((0, 1), (1, 1), (48, 1), (6000, 1), (6000, 3)):
            done, found = table.gather(ids[:n], dtype, threads)
            assert done == n
            torch.testing.assert_close(found, expected[ids[:n]].to(dtype), rtol=0, atol=0)
    assert (Attached(root, "small").shape.rows, Attached(root, "small").shape.dim) == (3, DIM)


@pytest.mark.parametrize("bad", [-1, ROWS, 2**62, -(2**63)])
def test_a_wrong_id_is_told_by_its_place(root: Path, bad: int) -> None:
    publish(root)
    done, found = Attached(root).gather([3, 5, bad, 7, bad])
    assert done == 2 and (found == -1).all()


def test_what_cannot_be_is_minus_one(root: Path) -> None:
    publish(root)
    table = Attached(root)
    out = torch.zeros(1, DIM)
    for n, of, threads in ((-1, 0, 1), (1, -1, 1), (1, 3, 1), (1, 0, 0), (2**60, 0, 1)):
        assert table.call(np.zeros(1, np.int64), n, out, of, threads) == -1


def test_missing_ids_read_the_rows_of_the_policy(root: Path) -> None:
    expected = publish(root, "fp32", missing="mean")
    done, found = Attached(root).gather([5, ROWS + 9, -3])
    assert done == 3
    torch.testing.assert_close(found, expected[[5, ROWS, ROWS]], rtol=0, atol=0)


def test_a_version_that_was_attached_stays(root: Path, anywhere: None) -> None:
    """While others are published, activated and removed."""
    old = publish(root)
    before = Attached(root)
    new = publish(root, seed=1)
    after = Attached(root)
    Model(root, "lm").remove(1)
    assert (before.shape.version, after.shape.version) == (1, 2)
    for table, expected in ((before, old), (after, new)):
        torch.testing.assert_close(table.gather(range(ROWS))[1], expected, rtol=0, atol=0)


def refusal(root: Path | str, *names: str) -> str:
    with pytest.raises(LookupError) as refused:
        Attached(root, *names)
    return str(refused.value)


def test_what_is_not_there_is_named(root: Path) -> None:
    assert refusal(root / "nowhere") == f"model lm is not published in {root}/nowhere"
    root.mkdir(exist_ok=True)
    assert refusal(root) == f"model lm is not published in {root}"
    publish(root)
    assert refusal(root, "other") == "there is no table 'other'; tableside inspect shows which"
    assert "expected letters" in refusal(root, "ngram", "../lm")
    Model(root, "lm").remove_all()
    assert refusal(root) == "no version of model lm is live"


def test_raw_ids_and_deltas_are_refused(root: Path) -> None:
    publish(root)
    apply(
        Model(root, "lm"), ChangeBatch((TableChanges("ngram", np.array([3]), np.ones((1, DIM), np.float32)),))
    )
    assert "tableside compact lm makes one version" in refusal(root)
    values = torch.randn(4, DIM)
    save_file({"ids": torch.tensor([9, 5, 70, 2]), "ngram": values}, root / "raw.safetensors")
    tables = {"ngram": {"key": "ngram", "id_key": "ids", "ids": "raw", "row_format": "int8"}}
    features = {"ngram": {"table": "ngram", "pooling": "none"}}
    told = {
        "name": "raw",
        "checkpoint": str(root / "raw.safetensors"),
        "tables": tables,
        "features": features,
    }
    load(parse_model(told, root), root)
    assert "raw ids" in refusal(root, "ngram", "raw")
    tables["ngram"] |= {"ttl": "30d", "missing": "zero"}
    load(parse_model(told, root), root)
    assert "the segment has format version 12; expected 1 to 10" in refusal(root, "ngram", "raw")


def changed(path: Path, change: Callable[[bytearray], None]) -> None:
    """Gives a file other bytes, as one that cannot be written is replaced."""
    data = bytearray(path.read_bytes())
    change(data)
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o400)


def test_damage_is_refused(root: Path) -> None:
    """Any bit of prelude, header and checksums; a file that was cut or is another table's."""
    publish(root)
    path = root / "lm" / "1.segment"
    whole = path.read_bytes()
    header_bytes = PRELUDE.unpack(whole[: PRELUDE.size])[2]
    rng = np.random.default_rng(1)
    for at in [*range(32), *rng.integers(64, 64 + header_bytes + 16, 200)]:
        changed(path, lambda data, at=at: data.__setitem__(int(at), data[at] ^ 1 << int(rng.integers(8))))  # type: ignore[misc]
        assert "segment" in refusal(root), at
        changed(path, lambda data: data.__setitem__(slice(None), whole))
    for size in (0, 40, 64, 4096, len(whole) - 1):
        changed(path, lambda data, size=size: data.__delitem__(slice(size, None)))  # type: ignore[misc]
        assert "segment is damaged" in refusal(root)
        changed(path, lambda data: data.__setitem__(slice(None), whole))
    assert Attached(root).gather([1])[0] == 1


IMPOSSIBLE: list[dict[str, Any]] = [
    {"rows": 2**62}, {"rows": -1}, {"rows": 0}, {"offset": 2**63 - 1}, {"offset": -8}, {"offset": "x"},
    {"dim": 2**40}, {"dim": 0}, {"dim": 97.5}, {"row_bytes": 1}, {"row_format": "int9"}, {"chunk_rows": 0},
    {"name": None}, {"name": "small"}, {"row_format": "int4", "dim": 25}, {"row_format": "int2", "dim": 94},
    {"ids": {"count": ROWS, "default_row": -5}}, {"ids": {"count": ROWS, "default_row": 3}},
    {"ids": {"count": -3}},
    {"ids": {"count": ROWS + 1}}, {"ids": {"count": 5, "backfilled": 2**63 - 1}}, {"ids": {}}, {"ids": 7},
    {"ids": {"count": 5, "first": -1}},
]  # fmt: skip


@pytest.mark.parametrize("told", IMPOSSIBLE, ids=str)
@pytest.mark.drawn(12)
def test_impossible_headers_with_a_right_checksum_are_refused(root: Path, told: dict[str, Any]) -> None:
    publish(root)

    def change(header: dict[str, Any]) -> None:
        next(t for t in header["tables"] if t["name"] == "ngram").update(told)

    write_header(root, change)
    said = refusal(root)
    assert "publish" in said or "no table" in said


def write_header(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes what the header of version 1 says; its checksum is right."""

    def rewrite(data: bytearray) -> None:
        magic, version, header_bytes, size, _ = PRELUDE.unpack(data[: PRELUDE.size])
        end = PRELUDE.size + header_bytes
        header = json.loads(data[PRELUDE.size : end])
        sums = data[end : end + 8 * len(header["tables"])]
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(header_bytes)
        assert len(text) == header_bytes
        data[PRELUDE.size : end] = text
        data[: PRELUDE.size] = PRELUDE.pack(magic, version, header_bytes, size, checksum(text + sums))

    changed(root / "lm" / "1.segment", rewrite)


@pytest.mark.parametrize("offset", [-(2**63), 2**63 - 1, 0])
def test_impossible_files_are_refused(root: Path, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGE_PAGES", 0)
    publish(root)
    write_header(root, lambda header: header["files"][1].update(offset=offset))
    assert "publish" in refusal(root)


def test_a_number_that_runs_to_the_end_of_the_file_is_damage(root: Path) -> None:
    """Its digits are not followed into what lies behind the mapping."""
    publish(root)
    body = b'{"files":[{"checksum":'
    head = PRELUDE.pack(b"TABLSIDE", 4, 4096 - PRELUDE.size, 4096, 0)
    changed(
        root / "lm" / "1.segment", lambda data: data.__setitem__(slice(None), (head + body).ljust(4096, b"1"))
    )
    assert "header of the segment is damaged" in refusal(root)


def test_a_refused_root_is_told_for_what_it_is(root: Path, tmp_path: Path) -> None:
    publish(root)
    os.symlink(root, tmp_path / "link")
    (tmp_path / "file").touch()
    for name in ("link", "link/", "file"):
        assert "expected a folder" in refusal(f"{tmp_path}/{name}")
    os.chmod(root, 0o777)
    assert "has mode 0777" in refusal(root)
    os.chmod(root, 0o700)


def test_a_file_of_another_table_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGE_PAGES", 0)
    publish(root)
    folder = root / "lm"
    shutil.copy(folder / "1.1.rows", folder / "copy")
    os.replace(folder / "copy", folder / "1.2.rows")
    assert "1.2.rows is not the table's file that version 1 names" in refusal(root)
    os.unlink(folder / "1.2.rows")
    assert refusal(root) == "the files of model lm are gone; publish it again"


def test_files_that_others_can_change_are_refused(root: Path) -> None:
    publish(root)
    os.chmod(root / "lm", 0o722)
    assert "other users can change it" in refusal(root)
    os.chmod(root / "lm", 0o700)
    os.rename(root / "lm", root / "real")
    os.symlink(root / "real", root / "lm")
    assert "expected a folder" in refusal(root)


def test_a_program_in_c_prints_rows(root: Path, tmp_path: Path) -> None:
    """examples/c/gather.c as docs/ngram.md compiles it, without a warning."""
    expected = publish(root, "fp8_e4m3_block32")
    here = [f"-I{PACKAGE}", str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}"]
    compiler = sysconfig.get_config_var("CC").split()[0]
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    build = [
        compiler,
        *strict,
        str(TOP / "examples" / "c" / "gather.c"),
        *here,
        "-o",
        str(tmp_path / "gather"),
    ]
    subprocess.run(build, check=True)

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "TABLESIDE_ROOT": str(root)}
        return subprocess.run(
            [tmp_path / "gather", *arguments], capture_output=True, text=True, env=environment, check=False
        )

    lines = run("lm", "ngram", "4", "699").stdout.splitlines()
    assert lines[0] == "version 1" and [line.split(":")[0] for line in lines[1:]] == ["4", "699"]
    found = torch.tensor([[float(x) for x in line.split(":")[1].split()] for line in lines[1:]])
    torch.testing.assert_close(found, expected[[4, 699]], rtol=0, atol=0)
    assert run("lm", "ngram", "4", "700").stderr == "id 700 is no row of ngram; it has 700\n"
    assert run("lm", "absent", "1").returncode == 1
