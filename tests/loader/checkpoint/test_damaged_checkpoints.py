"""Checkpoints that lie: each is refused in one line, in a child whose memory and time are bounded
(campaigns/files.py)."""

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent.parent))
from campaigns import file_cases, file_data
from campaigns.common import random_of
from campaigns.files import Child, mutate
from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.checkpoint.rows import Matrix, RowShard
from tableside.loader.errors import CheckpointError
from tableside.quant import Source

SEED, MUTATIONS = 11, 60
CASES = {case.name: case for case in file_cases.cases()}


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A loader in a process of its own: 4 GiB of addresses more than it begins with, 30 s for an answer."""
    with Child(tmp_path_factory.mktemp("root") / "m") as asked:
        yield asked


@pytest.mark.parametrize("kind", file_cases.HONEST)
@pytest.mark.drawn(3)
def test_honest_files_load(kind: str, child: Child, tmp_path: Path) -> None:
    """The files that the lies are made of are themselves in order, so that each refusal is the lie's."""
    assert child.ask(file_cases.HONEST[kind](tmp_path)).outcome == "true"


@pytest.mark.drawn(60)
@pytest.mark.parametrize("name", CASES)
def test_a_lie_is_refused(name: str, child: Child, tmp_path: Path) -> None:
    """One line, no other rows, no traceback, signal or hang; a few megabytes on disk take at most 512 MiB
    of memory."""
    found = child.ask(CASES[name].write(tmp_path))
    assert found.outcome in ("refused", CASES[name].expected) and found.grown_bytes < 512 << 20, found


@pytest.mark.parametrize("kind", file_cases.HONEST)
@pytest.mark.drawn(4)
def test_random_changes_break_nothing(kind: str, child: Child, tmp_path: Path) -> None:
    """60 of each kind: refused in one line, or loaded; with the true rows where every byte that counts has
    a CRC-32."""
    allowed = ("refused", "true") if kind in ("pt", "npz") else ("refused", "true", "other")
    for number in range(MUTATIONS):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = file_cases.HONEST[kind](folder)
        rng = random_of(SEED, kind, number)
        victim = rng.choice([p for p in sorted(folder.iterdir()) if p.is_file() and not p.is_symlink()])
        victim.write_bytes(mutate(victim.read_bytes(), rng))
        found = child.ask(path)
        assert found.outcome in allowed, (SEED, number, found)


# ---- memory ----


@pytest.mark.thorough
def test_a_header_of_a_million_tensors_takes_little_memory(child: Child, tmp_path: Path) -> None:
    """Refused at the bound; a hundred thousand are read, in less than 400 MiB."""
    for tensors, outcome in ((1_000_000, "refused"), (100_000, "true")):
        empty = ",".join(
            f'"tensor_{i}":{{"dtype":"F32","shape":[0,4],"data_offsets":[0,0]}}' for i in range(tensors)
        )
        text = f'{{{empty},"a":{{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]}}}}'.encode()
        (tmp_path / "c.safetensors").write_bytes(file_cases.safetensors(text))
        found = child.ask(tmp_path / "c.safetensors")
        assert (found.outcome, found.grown_bytes < 400 << 20) == (outcome, True), found


# ---- what is said ----


@pytest.mark.drawn(10)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "pt: byteorder b'big'",
            r"c\.pt: its values are big-endian.*torch\.save\(torch\.load\(path, weights_only=True\), path\)",
        ),
        (
            "pt: 33 values in a record of 32",
            r"storage '0' should have 33 values of 4 bytes, its record has 128 bytes",
        ),
        (
            "pt: one row beyond its storage",
            r"shape \[9, 4\], strides \[4, 1\], offset 0 ends outside its storage of 128 bytes",
        ),
        ("pt: offset -1", "a tensor of shape .* offset -1"),
        ("pt: global os system", r"could run code \(GLOBAL os\.system\); save its state_dict\(\) alone"),
        ("pt: a record inside another", "two records overlap"),
        ("pt: bomb: 6,000,000 instructions", "more than 5,000,000 instructions"),
        ("pt: bomb: a dict that holds itself", "a dict in it holds itself"),
        (
            "pt: bomb: dicts that double 40 times",
            "a dict in it holds itself, or dicts are nested without end",
        ),
        ("pt: bomb: a pickle of 80 MB", "has 80,000,139 bytes, more than the 67,108,864 that are read"),
        ("pt: pickle: a string of 4 GB", "4,294,967,295 more were expected"),
        ("pt: a TorchScript program", r"torch\.save its state_dict\(\) alone"),
        ("pt: compressed", "write it with torch.save, which does not compress"),
        ("npz: compressed", r"write it with np\.savez, not np\.savez_compressed"),
        ("npz: a name twice", "'a.npy' is there twice"),
        ("npy: two arrays", "holds more than one array"),
        ("npy: a byte missing", "it was truncated"),
        (
            "safetensors: a hole between tensors",
            "'b' begins at byte 132 of the values, the tensor before it ends at 128",
        ),
        (
            "safetensors: tensors that overlap",
            "'b' begins at byte 64 of the values, the tensor before it ends at 128",
        ),
        ("safetensors: bytes after the last tensor", "1 bytes follow the last tensor"),
        ("safetensors: a name twice", "'a' is there twice"),
        ("safetensors: shape[0] True", "expected a list of whole numbers"),
        ("index: file '../c.safetensors'", "lies outside the checkpoint's folder"),
        ("index: file 'c\\x00.safetensors'", "lies outside the checkpoint's folder"),
        ("index: file 'fifo'", "a file of the checkpoint is a FIFO; expected a regular file"),
        ("dcp: offset -1", "expected a whole number from 0, found -1"),
        ("dcp: offset inf", "expected a whole number from 0, found inf"),
        ("dcp: file 'device'", "a file of the checkpoint is a device"),
        ("dcp: two items that share bytes", "'a' and 'b' share bytes of '__0_0.distcp'"),
        ("dcp: a chunk twice", "two shards of 'a' hold the same values"),
        ("dcp: no chunk", "'a' has .* a part of the checkpoint is missing"),
        ("no file: a FIFO called .pt", "the checkpoint is a FIFO; expected a regular file"),
        ("no file: /dev/zero called .safetensors", "the checkpoint is a device"),
    ],
)
def test_what_is_said(name: str, message: str, tmp_path: Path) -> None:
    """What, where and the remedy."""
    with pytest.raises(CheckpointError, match=message) as found:
        open_checkpoint(CASES[name].write(tmp_path)).matrix("a")
    assert str(tmp_path) in str(found.value)


# ---- torch's own files ----


def test_a_big_endian_file_of_torch_is_refused(tmp_path: Path) -> None:
    """Written by torch.save, then said to be of the other byte order, with the CRC-32 of that record
    right."""
    import zipfile

    torch.save({"a": torch.zeros(4, 4)}, tmp_path / "c.pt")
    with zipfile.ZipFile(tmp_path / "c.pt") as source, zipfile.ZipFile(tmp_path / "big.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, b"big" if name.endswith("byteorder") else source.read(name))
    with pytest.raises(CheckpointError, match="its values are big-endian"):
        open_checkpoint(tmp_path / "big.pt")


def _module() -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {"bag": torch.nn.EmbeddingBag(10, 4), "norm": torch.nn.BatchNorm1d(4), "out": torch.nn.Linear(4, 2)}
    )


def _trained() -> dict[str, object]:
    module = _module()
    optimizer = torch.optim.Adam(module.parameters())
    module["out"](module["bag"](torch.zeros(3, 2, dtype=torch.long))).sum().backward()
    optimizer.step()
    plain = {
        "epoch": 1,
        "lr": 0.1,
        "names": ["a", None],
        "size": torch.Size([1, 2]),
        "big": 2**200,
        "bytes": b"x",
        "set": {1},
    }
    odd = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "complex": 1j,
        "array": bytearray(b"x"),
        "pair": (1, (2,)),
    }
    return {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict(), **plain, **odd}


BIG = torch.arange(160, dtype=torch.float32).reshape(20, 8)
MANY = (torch.float16, torch.bfloat16, torch.float64, torch.uint16, torch.float8_e5m2, torch.bool)
SAVED: dict[str, tuple[Callable[[], object], set[str]]] = {
    "a module": (lambda: _module().state_dict(), {"bag.weight", "out.weight"}),
    "a training checkpoint": (
        _trained,
        {"state_dict.bag.weight", "state_dict.out.weight", "optimizer.state.0.exp_avg"},
    ),
    "parameters and buffers": (lambda: {"p": torch.nn.Parameter(BIG), "b": torch.nn.Buffer(BIG)}, {"p", "b"}),
    "views of one storage": (lambda: {"a": BIG[3:9], "b": BIG[:, 2:3], "c": BIG.t(), "d": BIG}, {"a", "d"}),
    "one row": (lambda: {"a": BIG[:1], "b": BIG[:, :1].contiguous().t(), "c": BIG[3:4]}, {"a", "b", "c"}),
    "a tensor alone": (lambda: BIG, {"tensor"}),
    "keys of many kinds": (
        lambda: {0: BIG, (1, 2): BIG, None: BIG, 1.5: BIG},
        {"0", "(1, 2)", "None", "1.5"},
    ),
    "empty and scalar": (lambda: {"e": torch.zeros(0, 4), "s": torch.tensor(3.0), "a": BIG}, {"a"}),
    "meta": (lambda: {"m": torch.zeros(3, 3, device="meta"), "a": BIG}, {"a"}),
    "sparse": (lambda: {"s": BIG.to_sparse(), "a": BIG}, {"a"}),
    "dtypes": (lambda: {str(d): BIG.to(d) for d in MANY}, {"torch.float16", "torch.bfloat16"}),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("what", SAVED)
def test_what_torch_saves_is_read(what: str, protocol: int, tmp_path: Path) -> None:
    """The same matrices, of the same values, as torch.load (weights_only) finds, without torch."""
    make, expected = SAVED[what]
    saved = make()
    torch.save(saved, tmp_path / "c.pt", pickle_protocol=protocol)
    with open_checkpoint(tmp_path / "c.pt") as found:
        assert expected <= set(found.matrices) and (
            len(expected) == len(found.matrices) or "training" in what
        )
        for key in expected:
            matrix = found.matrix(key)
            found.open_files(matrix)
            out = np.empty(
                (matrix.rows, matrix.dim), {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2"}[matrix.source.label]
            )
            found.read(matrix, 0, matrix.rows, out, bytearray(out.nbytes))
            if what not in ("a training checkpoint", "a module"):
                values = {str(k): v for k, v in saved.items()}[key] if isinstance(saved, dict) else saved
                raw = values.detach().contiguous().view(torch.uint8).numpy().tobytes()
                assert out.tobytes() == raw


def test_torchs_older_format_names_the_remedy(tmp_path: Path) -> None:
    torch.save({"a": BIG}, tmp_path / "c.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(
        CheckpointError, match=r"older than torch 1\.6's format; load it with torch, and torch\.save it again"
    ):
        open_checkpoint(tmp_path / "c.pt")


def test_a_pt_is_read_without_torch(tmp_path: Path) -> None:
    """No module of torch's is imported for it, nor for a distributed checkpoint."""
    import subprocess

    torch.save({"a": BIG}, tmp_path / "c.pt")
    dcp = Path(__file__).parent.parent.parent / "fixtures" / "torchrec_dcp"
    program = (
        "import sys; from pathlib import Path; from tableside.loader.checkpoint import open_checkpoint\n"
        f"for p in ({str(tmp_path / 'c.pt')!r}, {str(dcp)!r}): assert open_checkpoint(Path(p)).matrices\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---- shards ----


def _grid(rows: int, columns: int, path: Path) -> tuple[RowShard, ...]:
    return tuple(RowShard(path, 0, r, 1, c, 1) for r in range(rows) for c in range(columns))


@pytest.mark.drawn(0.5)
def test_shards_are_checked_in_little_time(tmp_path: Path) -> None:
    """40,000 shards, by row and column; comparing each with each would take minutes. The child's deadline
    is pytest's here."""
    (tmp_path / "x").write_bytes(bytes(16))
    shards = _grid(200, 200, tmp_path / "x")
    matrix = Matrix("a", 200, 200, Source.FP32, shards)
    assert matrix.check(tmp_path) is matrix
    with pytest.raises(CheckpointError, match="hold the same values"):
        Matrix("a", 200, 200, Source.FP32, (*shards[:-1], shards[77])).check(tmp_path)
    with pytest.raises(CheckpointError, match="its shards hold 39999 of 40000"):
        Matrix("a", 200, 200, Source.FP32, shards[:-1]).check(tmp_path)


@pytest.mark.parametrize("shard", [(-4, 2), (48, 2), (64, 1), (1 << 62, 2)])
def test_shards_that_lie_outside_their_file_are_refused(shard: tuple[int, int], tmp_path: Path) -> None:
    """Whatever the format's reader let through: before a row is read, with the file's size."""
    (tmp_path / "x").write_bytes(bytes(64))
    offset, rows = shard
    assert Matrix("a", 2, 4, Source.FP32, (RowShard(tmp_path / "x", 32, 0, 2, 0, 4),)).check(tmp_path)
    with pytest.raises(CheckpointError, match="the file at 64; it was truncated or is still being written"):
        Matrix("a", rows, 4, Source.FP32, (RowShard(tmp_path / "x", offset, 0, rows, 0, 4),)).check(tmp_path)


@pytest.mark.drawn(19)
@pytest.mark.parametrize("seed", range(40))
def test_overlaps_are_those_that_a_plain_comparison_finds(seed: int, tmp_path: Path) -> None:
    """Random rectangles against a count of who holds each value."""
    (tmp_path / "x").write_bytes(bytes(1000))
    rng = np.random.default_rng(seed)
    held = np.zeros((12, 9), int)
    shards = []
    for _ in range(rng.integers(1, 7)):
        row, column = int(rng.integers(0, 12)), int(rng.integers(0, 9))
        rows, columns = int(rng.integers(1, 13 - row)), int(rng.integers(1, 10 - column))
        held[row : row + rows, column : column + columns] += 1
        shards.append(RowShard(tmp_path / "x", 0, row, rows, column, columns))
    matrix = Matrix("a", 12, 9, Source.FP32, tuple(shards))
    message = (
        "hold the same values"
        if held.max() > 1
        else "a part of the checkpoint is missing"
        if held.min() < 1
        else None
    )
    if message is None:
        assert matrix.check(tmp_path) is matrix
    else:
        with pytest.raises(CheckpointError, match=message):
            matrix.check(tmp_path)


@pytest.mark.thorough
def test_two_tensors_of_one_name_cannot_be_a_table(tmp_path: Path) -> None:
    """A dict's key with a dot in it, beside a dict in a dict."""
    torch.save({"a.b": BIG, "a": {"b": BIG + 1}, "c": BIG}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as found:
        with pytest.raises(CheckpointError, match="two tensors have this name"):
            found.matrix("a.b")
        assert found.matrix("c").rows == 20


@pytest.mark.thorough
def test_metadata_of_safetensors_is_walked_over(tmp_path: Path) -> None:
    """Braces, escapes and quotes in its strings; white space anywhere that JSON allows it."""
    metadata = json.dumps({"format": "pt", "x": 'a "}" b \\ {', "empty": ""}, indent=2)
    entry = '{ "data_offsets" : [ 0 , 128 ] , "dtype" : "F32" , "shape" : [ 8 , 4 ] }'
    for header in (
        f'{{"__metadata__": {metadata} , "a" : {entry} }}   ',
        f'{{"a":{entry},"__metadata__":{{}}}}',
        f'{{\n"a"\t:\r\n{entry}\n}}',
    ):
        data = struct.pack("<Q", len(header)) + header.encode() + file_data.DATA
        (tmp_path / "c.safetensors").write_bytes(data)
        assert list(open_checkpoint(tmp_path / "c.safetensors").matrices) == ["a"], header


def test_a_record_that_reaches_into_the_directory_is_refused(tmp_path: Path) -> None:
    """By one byte, which both of its headers say."""
    path = tmp_path / "c.npz"
    np.savez(path, t=np.ones((4, 8), np.float32))
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\1\2")
    (size,) = struct.unpack_from("<I", data, directory + 24)
    for place in (directory + 20, directory + 24):
        struct.pack_into("<I", data, place, size + 1)
    local = data.index(struct.pack("<QQ", size, size))  # numpy writes zip64's
    struct.pack_into("<QQ", data, local, size + 1, size + 1)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"record 't.npy' ends at byte \d+, the directory begins at"):
        open_checkpoint(path)
