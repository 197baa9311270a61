"""What was understood of the headers that came before: for each version, the infer requests of the headers used last.

The memory of a version goes with the version: the version is the key of a weak dictionary, and no infer request holds it. So a
version that was replaced is unmapped although its headers were remembered.
"""

from collections import OrderedDict
from weakref import WeakKeyDictionary

from tableside.serving.http.v2_request import InferRequest
from tableside.serving.version import ServedVersion

REMEMBERED_HEADERS = 256  # of each version
REMEMBERED_HEADER_BYTES = 32 << 10  # a longer header is understood anew each time


class HeaderMemory:
    """Infer requests by version and header bytes. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[ServedVersion, OrderedDict[bytes, InferRequest]] = WeakKeyDictionary()

    def recall(self, version: ServedVersion, head: bytes) -> InferRequest | None:
        """What `version` made of this header, or None."""
        known = self._known.get(version)
        if known is None or (infer := known.get(head)) is None:
            return None
        known.move_to_end(head)
        return infer

    def remember(self, version: ServedVersion, head: bytes, infer: InferRequest) -> None:
        """Keeps what `version` made of a header. Beyond REMEMBERED_HEADERS the one not used for longest is forgotten."""
        if len(head) > REMEMBERED_HEADER_BYTES:
            return
        known = self._known.setdefault(version, OrderedDict())
        known[head] = infer
        if len(known) > REMEMBERED_HEADERS:
            known.popitem(last=False)
