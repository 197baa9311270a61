"""Launches that are the same for many batches, as CUDA graphs: one call takes the place of some twenty.

The first batch of a shape is launched kernel by kernel. At the second one the same launches are captured, on streams of
their own, and from then on replayed. A shape names everything that the launches depend on but the batch's record.

While a graph is captured, no thread may synchronize the whole device; the capture would fail.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any

import torch

from tableside.quant.cache.streams import Streams, is_capturing

_KEPT = 64  # graphs; some hundred KB each


class Replays:
    """The graphs of one cache, those used last. `streams` are the cache's; None captures nothing, as in the interpreter.

    graphs: by their shapes, that used last at the end. The caller holds the cache's lock, and the main stream is the current one.
    """

    def __init__(self, streams: Streams | None) -> None:
        self.graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._retired: deque[tuple[Any, Any]] = deque()  # graph, and an event after which no replay of it is under way
        self._streams = None
        if streams is not None and streams.main is not None:
            stream = torch.cuda.Stream(streams.device, streams.main.priority)  # type: ignore[no-untyped-call]
            self._streams = Streams(streams.device, stream)

    def __call__(self, shape: Hashable, streams: Streams, launch: Callable[[Streams], None]) -> None:
        """Does what `launch` does with the cache's streams. It ends on the main stream, behind all others."""
        graph = self._graph(shape, launch)
        if graph is None:
            launch(streams)
        else:
            graph.replay()

    def _graph(self, shape: Hashable, launch: Callable[[Streams], None]) -> Any:
        if self._streams is None or is_capturing():
            return None
        if shape in self.graphs:
            self.graphs.move_to_end(shape)
            return self.graphs[shape]
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        self.graphs[shape] = self._captured(self._streams, launch)
        if len(self.graphs) > _KEPT:
            self._retire(self.graphs.popitem(last=False)[1])
        return self.graphs[shape]

    def _captured(self, streams: Streams, launch: Callable[[Streams], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(streams.main):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch(streams)
            finally:
                graph.capture_end()
        return graph

    def forget(self) -> None:
        """Lets go of all graphs, since the launches change. None is captured before its shape comes twice again."""
        self._seen.clear()
        while self.graphs:
            self._retire(self.graphs.popitem()[1])

    def _retire(self, graph: Any) -> None:
        """Keeps a graph until its last replay is over."""
        while self._retired and self._retired[0][1].query():
            self._retired.popleft()
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record()
        self._retired.append((graph, over))
