"""Folders of torch's distributed checkpoints (DCP) that lie."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.file_data import SHAPE, Write
from campaigns.pt_cases import held, name, pt, tensor, value


def made(full: str, state: dict[str, bytes]) -> bytes:
    """The instructions of an object of torch's, with its state."""
    module, _, what = full.rpartition(".")
    items = b"".join(value(key) + v for key, v in state.items())
    return name(f"torch.distributed.checkpoint.{module}", what) + b")\x81}(" + items + b"ub"


def size(*numbers: Any) -> bytes:
    return name("torch", "Size") + value((tuple(numbers),)) + b"R"


ITEM = pt(tensor())
ITEM_BYTES = len(ITEM)


@dataclass(frozen=True)
class Dcp:
    """The metadata of one tensor "a" of one chunk; each field may lie."""

    shape: bytes = size(*SHAPE)
    offsets: bytes = size(0, 0)
    sizes: bytes = size(*SHAPE)
    index: bytes = size(0, 0)
    file: Any = "__0_0.distcp"
    offset: Any = 0
    length: Any = ITEM_BYTES
    dtype: bytes = name("torch", "float32")
    chunks: int = 1
    more: bytes = b""

    def pickle(self) -> bytes:
        chunk = made("metadata.ChunkStorageMetadata", {"offsets": self.offsets, "sizes": self.sizes})
        properties = made("metadata.TensorProperties", {"dtype": self.dtype})
        entry = {"properties": properties, "size": self.shape, "chunks": b"](" + chunk * self.chunks + b"e"}
        index = made("metadata.MetadataIndex", {"fqn": value("a"), "offset": self.index, "index": b"N"})
        place = {
            "relative_path": value(self.file),
            "offset": value(self.offset),
            "length": value(self.length),
        }
        items = index + made("filesystem._StorageInfo", place) + self.more
        state = {
            "state_dict_metadata": held(made("metadata.TensorStorageMetadata", entry)),
            "storage_data": b"}(" + items + b"u",
        }
        return b"\x80\x02" + made("metadata.Metadata", state) + b"."


def dcp(metadata: bytes, item: bytes = ITEM) -> Write:
    def write(folder: Path) -> Path:
        os.mkfifo(folder / "fifo")
        (folder / "device").symlink_to("/dev/zero")
        (folder / "__0_0.distcp").write_bytes(item)
        (folder / ".metadata").write_bytes(metadata)
        return folder

    return write


def dcp_cases() -> Iterator[tuple[str, Write]]:
    odd: list[Any] = [
        -1,
        2**31,
        2**63,
        2**70,
        0.5,
        float("inf"),
        float("-inf"),
        float("nan"),
        "0",
        None,
        True,
        (),
        [],
        {},
    ]
    for bad in odd:
        yield f"offset {bad!r:.30}", dcp(Dcp(offset=bad).pickle())
        yield f"length {bad!r:.30}", dcp(Dcp(length=bad).pickle())
        yield f"file {bad!r:.30}", dcp(Dcp(file=bad).pickle())
        for i in (0, 1):
            two = [bad if j == i else 0 for j in (0, 1)]
            yield f"offsets[{i}] {bad!r:.30}", dcp(Dcp(offsets=size(*two), index=size(*two)).pickle())
            yield (
                f"sizes[{i}] {bad!r:.30}",
                dcp(Dcp(sizes=size(*(bad if j == i else n for j, n in enumerate(SHAPE)))).pickle()),
            )
            yield (
                f"shape[{i}] {bad!r:.30}",
                dcp(Dcp(shape=size(*(bad if j == i else n for j, n in enumerate(SHAPE)))).pickle()),
            )
        yield f"index's offset {bad!r:.30}", dcp(Dcp(index=value((bad, bad))).pickle())
    for file in (
        "../x",
        "/etc/passwd",
        "",
        ".",
        "..",
        "gone",
        "fifo",
        "device",
        "a/b",
        "__0_0.distcp\0",
        "x" * 300,
        "\ud800",
    ):
        yield f"file {file!r:.30}", dcp(Dcp(file=file).pickle())
    for dtype in (name("torch", "float16"), name("torch", "bfloat16"), value("float32"), b"N", value(1)):
        yield f"dtype {dtype!r}", dcp(Dcp(dtype=dtype).pickle())
    yield "a chunk twice", dcp(Dcp(chunks=2).pickle())
    yield "no chunk", dcp(Dcp(chunks=0).pickle())
    yield "a chunk of one dimension", dcp(Dcp(offsets=size(0), sizes=size(32), index=size(0)).pickle())
    yield "a chunk elsewhere", dcp(Dcp(offsets=size(1, 0), index=size(1, 0)).pickle())
    yield "a shape larger than its chunks", dcp(Dcp(shape=size(9, 4)).pickle())
    yield "a shape smaller than its chunks", dcp(Dcp(shape=size(7, 4)).pickle())
    other = made("metadata.MetadataIndex", {"fqn": value("b"), "offset": size(0, 0), "index": b"N"})
    place = {"relative_path": value("__0_0.distcp"), "offset": value(4), "length": value(20)}
    yield "two items that share bytes", dcp(Dcp(more=other + made("filesystem._StorageInfo", place)).pickle())
    zipped = {**place, "transform_descriptors": value(["zstd"])}
    yield (
        "an item that is transformed",
        dcp(
            Dcp(
                index=size(9, 9),
                more=made("metadata.MetadataIndex", {"fqn": value("a"), "offset": size(0, 0)})
                + made("filesystem._StorageInfo", zipped),
            ).pickle()
        ),
    )
    for what, item in {
        "nothing": b"",
        "a dict": pt(held(tensor())),
        "half an archive": ITEM[: len(ITEM) // 2].ljust(len(ITEM)),
        "numbers": pt(value(3)).ljust(len(ITEM)),
    }.items():
        yield f"an item that is {what}", dcp(Dcp().pickle(), item)
    whole = Dcp().pickle()
    for what, metadata in {
        "no bytes": b"",
        "another object": b"\x80\x02}.",
        "a number": b"\x80\x02K\1.",
        "half": whole[: len(whole) // 2],
        "os.system": b"\x80\x02" + name("os", "system") + b".",
        "torch.load": b"\x80\x02" + name("torch", "load") + b".",
        "3 MB of dicts": b"\x80\x02(" + b"}" * 3_000_000 + b"t.",
        "a memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
        "nested tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
        "Metadata without state": b"\x80\x02"
        + name("torch.distributed.checkpoint.metadata", "Metadata")
        + b")\x81.",
        "Metadata of lists": b"\x80\x02"
        + made("metadata.Metadata", {"state_dict_metadata": b"]", "storage_data": b"]"})
        + b".",
        "100 MB": bytes(100_000_000),
    }.items():
        yield f"metadata of {what}", dcp(metadata)
