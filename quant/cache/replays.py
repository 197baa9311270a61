"""CUDA graphs of launches that repeat: one call replaces some twenty.
The first batch of a shape is launched kernel by kernel, the second captured on separate streams, the rest
replayed. A shape holds all that the launches depend on but the batch's record. During a capture no thread may
synchronize the whole device; the capture would fail."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any

from tableside.quant.cache.streams import Streams

_KEPT = 64  # graphs; some hundred KB each


class Replays:
    """The most recently used graphs of a cache. captures: False: launch every batch kernel by kernel.
    graphs: by shape, the last used at the end. The caller holds the cache's lock on the main stream."""

    def __init__(self, streams: Streams, captures: bool) -> None:
        self._device = streams.device
        self.graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._retired: deque[tuple[Any, Any]] = (
            deque()
        )  # graph, and an event after which no replay of it is under way
        self._streams = (
            Streams(streams.device, streams.device.stream(streams.main.priority)) if captures else None
        )

    def __call__(self, shape: Hashable, streams: Streams, launch: Callable[[Streams], None]) -> None:
        """Does what `launch` does with the cache's streams. It ends on the main stream, behind all others."""
        graph = self._graph(shape, launch)
        if graph is None:
            launch(streams)
        else:
            graph.replay()

    def _graph(self, shape: Hashable, launch: Callable[[Streams], None]) -> Any:
        if (streams := self._streams) is None:
            return None
        if shape in self.graphs:
            self.graphs.move_to_end(shape)
            return self.graphs[shape]
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        self.graphs[shape] = self._device.capture(streams.main, lambda: launch(streams))
        if len(self.graphs) > _KEPT:
            self._retire(self.graphs.popitem(last=False)[1])
        return self.graphs[shape]

    def forget(self) -> None:
        """Drops all graphs, since launches change. A shape must come twice again before it is captured."""
        self._seen.clear()
        while self.graphs:
            self._retire(self.graphs.popitem()[1])

    def _retire(self, graph: Any) -> None:
        """Keeps a graph until its last replay is over."""
        while self._retired and self._retired[0][1].query():
            self._retired.popleft()
        over = self._device.event()
        over.record()
        self._retired.append((graph, over))
