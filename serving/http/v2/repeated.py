"""Requests that are told again and again in the same words, as all their tensors lie in a GPU's memory: what
their headers mean.

Such a request is its header alone. Where it comes again, byte for byte, nothing of it needs to be understood
anew, as long as the version and the registered regions are the same.
"""

import weakref
from collections import OrderedDict
from typing import Any

from tableside.serving.http.v2.request import InferRequest
from tableside.serving.model.version import ServedVersion
from tableside.serving.shm.regions import PartlyOnDevice

_KEPT, _LONGEST = 256, 64 << 10  # headers, and bytes of one


class HeaderMemory:
    """Headers that came last, with what they mean. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, bytes], tuple[weakref.ref[ServedVersion], int, InferRequest]] = (
            OrderedDict()
        )

    def find(self, served: ServedVersion, body: bytes, generation: int) -> InferRequest | None:
        """What a body means; None: it did not come before. generation: of the list of regions."""
        if len(body) > _LONGEST or (known := self._known.get(key := (served.header.model, body))) is None:
            return None
        version, then, infer = known
        if version() is not served or then != generation:
            del self._known[key]
            return None
        self._known.move_to_end(key)
        return infer

    def keep(self, served: ServedVersion, body: bytes, generation: int, infer: InferRequest) -> None:
        """Keeps what a body means, where it is the same whatever memory holds."""
        inputs: Any = infer.inputs
        if not isinstance(inputs, PartlyOnDevice) or not infer.head or infer.into or len(body) > _LONGEST:
            return
        if sum(one.size for one in inputs.reads) < memoryview(inputs.inputs).nbytes:
            return  # a tensor came with the body, or from a region of the host
        self._known[served.header.model, bytes(body)] = weakref.ref(served), generation, infer
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
