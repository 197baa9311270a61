"""Copies of a version, one on each of some NUMA nodes, so that a GPU reads rows of its own node.

    ROOT/MODEL/3.node0.home       empty: the version's own files lie on node 0
    ROOT/MODEL/3.node1.segment    the copy of 3.segment on node 1
    ROOT/MODEL/3.node1.1.rows     the copy of 3.1.rows; unchanged tables are links, as those of the version

Copies have the bytes of the version's own files and go with it. Deltas lie once.
"""

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tableside.loader.errors import ModelError, SegmentError
from tableside.loader.segment.header import PRELUDE, Header
from tableside.loader.segment.huge_pages import is_on_disk
from tableside.loader.segment.layout import file_name
from tableside.loader.segment.memory import FileToMap, reserve
from tableside.loader.segment.memory import Mapping as MappedFiles
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.folder import Folder, others_of

_LIES_ON = re.compile(r"[0-9]+\.node([0-9]+)\.(home|segment)")
_ON_NODE = re.compile(r"\.node[0-9]+(?=\.)")
_PIECE_BYTES = 64 << 20


def on_node(name: str, node: int) -> str:
    """Returns the name of a file's copy."""
    version, _, rest = name.partition(".")
    return f"{version}.node{node}.{rest}"


def nodes_of(folder: Folder, version: int) -> list[int]:
    """Returns the nodes on which a version lies, that of its own files, then the others, ascending; empty:
    nobody chose one."""
    found = filter(None, map(_LIES_ON.fullmatch, others_of(folder)[version]))
    return [node for _, node in sorted((one[2], int(one[1])) for one in found)]


def copying_writer(
    folder: Folder,
    path: Path,
    header: Header,
    program: bytes,
    kept: Mapping[str, Segment],
    nodes: Sequence[int],
) -> SegmentWriter:
    """Returns the writer of a version that lies on the first of `nodes`, with room for its copies on the
    others. Errors: as of Model.writer."""
    if is_on_disk(folder.fd):
        raise ModelError(
            f"copies: {folder.path} lies on a disk, and NUMA nodes have copies of what lies in memory; "
            "choose another --root, or load without `copies`"
        )
    # A table that lies elsewhere is written again
    as_they_are = [nodes[0], *sorted(nodes[1:])]
    before = {segment.header.version for segment in kept.values()}
    there = {version for version in before if nodes_of(folder, version) == as_they_are}
    kept = {table: segment for table, segment in kept.items() if segment.header.version in there}
    writer = SegmentWriter(path, header, program, folder.create(path.name), folder, kept, nodes[0])
    try:
        _reserve(folder, writer, kept, nodes)
    except BaseException:
        writer.close()
        raise
    return writer


def _reserve(
    folder: Folder, writer: SegmentWriter, kept: Mapping[str, Segment], nodes: Sequence[int]
) -> None:
    """Makes the files of copies, with all bytes reserved. NoSpace: a node has too few."""
    segment = writer.path.name.removesuffix(".partial")
    os.close(folder.create(f"{segment.partition('.')[0]}.node{nodes[0]}.home"))
    for node in nodes[1:]:
        for number, (table, size) in enumerate(writer.sizes):
            name = file_name(writer.path, number) if number else segment
            if table in writer.linked and table is not None:
                before = next(file.path.name for file in kept[table].files if file.table == table)
                if folder.link(on_node(before, node), on_node(name, node)):
                    continue
            fd = folder.create(on_node(name, node))
            try:
                reserve([FileToMap(fd, size, True, node)], folder.path)
            finally:
                os.close(fd)


def fill_copies(folder: Folder, version: int) -> None:
    """Copies what a version's writer sealed to the files of its copies."""
    for name in others_of(folder)[version]:
        own = _ON_NODE.sub("", name)
        if own != name and not name.endswith(".home"):
            _fill(folder, own if folder.exists(own) else f"{own}.partial", name)


def check_copy(folder: Folder, own: str, copy: str) -> None:
    """Raises SegmentError for a file that is not the copy of a segment."""
    heads = []
    for name in (own, copy):
        fd = folder.open(name)
        try:
            heads.append(os.pread(fd, PRELUDE.size, 0))
        finally:
            os.close(fd)
    if heads[0] != heads[1]:
        raise SegmentError(
            f"{folder.path / copy} is no copy of {own}; somebody put it there: publish the version again"
        )


def _fill(folder: Folder, own: str, name: str) -> None:
    source = folder.open(own)
    try:
        found = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        if not found.st_mode & 0o200:  # a link to a copy that was filled before
            return
        target = folder.open(name, os.O_RDWR)
        try:
            size = os.fstat(source).st_size
            _copy(MappedFiles(FileToMap(source, size)), MappedFiles(FileToMap(target, size, writable=True)))
            os.fchmod(target, os.fstat(target).st_mode & 0o440)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy(source: MappedFiles, target: MappedFiles) -> None:
    def piece(start: int) -> None:
        target.bytes[start : start + _PIECE_BYTES] = source.bytes[start : start + _PIECE_BYTES]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "tableside-copy") as pool:
        list(pool.map(piece, range(0, source.size, _PIECE_BYTES)))
