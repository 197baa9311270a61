"""Places of a header's tensors in regions of shared memory, from the header's numbers. A template
(`serving.http.v2.templates`) has a `RegionParts` for inputs and one for outputs. Adjacent tensors are copied
together. Loops are written for speed: a request has dozens of tensors."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tableside.serving.http.v2 import shm
from tableside.serving.shm import regions
from tableside.serving.shm.regions import Regions, Slice

_BODY, _NONE = -1, -1


class GatheredBody(NamedTuple):
    """A body as if without regions: the header, padded to `header_bytes`, then all inputs."""

    body: memoryview
    header_bytes: int


class RegionParts:
    """For each input (or each output) tensor: its region, if any, and the indices of the header's numbers
    that hold offset and size."""

    def __init__(self, parameters: Iterable[dict[str, Any]]) -> None:
        """parameters: per tensor, with the index of each number in place of it."""
        given = list(parameters)
        self.names = tuple(dict.fromkeys(p[shm.REGION] for p in given if shm.REGION in p))
        self.in_body = [shm.REGION not in p for p in given]
        self._parts = [
            (
                self.names.index(p[shm.REGION]) if shm.REGION in p else _BODY,
                p.get(shm.OFFSET, _NONE),
                p[shm.SIZE] if shm.REGION in p else p.get("binary_data_size", _NONE),
            )
            for p in given
        ]

    def gather(
        self, numbers: Sequence[int], header: memoryview, binary: memoryview, known: Regions
    ) -> GatheredBody | None:
        """Copies inputs behind the header, which is padded to a multiple of 8 bytes. None: wrong or large,
        for the slow path. ApiError: a region is gone or truncated."""
        if any(map(known.is_on_device, self.names)):
            return None
        found = [known.find(name) for name in self.names]
        limits = [*(region.entry.byte_size for region in found), binary.nbytes]
        header_bytes = -(-header.nbytes // 8) * 8
        at, body_at = header_bytes, 0
        runs: list[tuple[int, int, int, int]] = []  # source, offset, size, and where in the buffer
        last, begin, begin_at, end = _BODY - 1, 0, at, 0
        for source, offset_hole, size_hole in self._parts:
            size = numbers[size_hole]
            if source == _BODY:
                offset = body_at
                body_at += size
            else:
                offset = 0 if offset_hole < 0 else numbers[offset_hole]
            if offset + size > limits[source]:
                return None
            if source != last or offset != end:
                runs.append((last, begin, at - begin_at, begin_at))
                last, begin, begin_at = source, offset, at
            end = offset + size
            at += size
        runs.append((last, begin, at - begin_at, begin_at))
        region_bytes = at - header_bytes - body_at
        if region_bytes > shm.INLINE_BYTES or body_at != binary.nbytes:
            return None
        body = np.empty(at, np.uint8).data
        body[:header_bytes] = bytes(header).ljust(header_bytes)
        for source, offset, size, place in runs:
            if source == _BODY:
                body[place : place + size] = binary[offset : offset + size]
            elif size:
                found[source].read(offset, body[place : place + size])
        return GatheredBody(body, header_bytes)

    def into(
        self, numbers: Sequence[int], ends: Sequence[tuple[int, int]], known: Regions
    ) -> tuple[Slice, ...] | None:
        """Returns where to write outputs that lie at `ends` in the output buffer. None: the slow path says
        what is wrong. ApiError: like `gather`."""
        if any(map(known.is_on_device, self.names)):
            return None
        found = [known.find(name) for name in self.names]
        limits = [region.entry.byte_size for region in found]
        runs: list[tuple[int, int, int, int]] = []
        last, begin, begin_at, end, end_at = _BODY, 0, 0, 0, 0
        for (source, offset_hole, size_hole), (start, stop) in zip(self._parts, ends, strict=True):
            if source == _BODY:
                continue
            offset, most = 0 if offset_hole < 0 else numbers[offset_hole], numbers[size_hole]
            if stop - start > most or offset + most > limits[source]:
                return None
            if source != last or offset != end or start != end_at:
                runs.append((last, begin, end - begin, begin_at))
                last, begin, begin_at = source, offset, start
            end, end_at = offset + stop - start, stop
        runs.append((last, begin, end - begin, begin_at))
        slices = tuple(
            Slice(found[source], offset, size, place) for source, offset, size, place in runs if size
        )
        return None if len(slices) > 1 and regions.overlap(slices) else slices
