"""A door's end of the connection to its engine. Requests lie in the door's memory until they are answered, so
a successor of an ended engine gets them again, twice at most. After TIMEOUT_S a request is answered 503."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import orjson

from tableside.loader.versions.states import State
from tableside.quant.contract import Unfound
from tableside.serving.engine_process import messages
from tableside.serving.engine_process.described import describe
from tableside.serving.engine_process.device_regions import between, parts_of
from tableside.serving.engine_process.memory import Blocks, Lent, SharedMemory
from tableside.serving.engine_process.messages import AnswerMessage, Ask, Connection, MessageKind
from tableside.serving.errors import ApiError, ErrorKind, ServingError
from tableside.serving.executors.admission import overloaded
from tableside.serving.executors.pending import Pending, kept, settle
from tableside.serving.model.engine import CacheState
from tableside.serving.model.request import Answer, Request
from tableside.serving.settings import ServerSettings
from tableside.serving.shm.regions import PartlyOnDevice, Slice

logger = logging.getLogger("tableside")

TIMEOUT_S = 30.0  # that a request waits for an engine process, or for its successor
REQUESTS_BYTES = 128 << 20  # of memory for a door's requests, at least
_LOOK_S = 0.1
_DESCRIBED = 64  # states of all models that what the engine said of is kept
_MOST_ASKED = 3  # times that a request is sent: it may be what ends engines


class _Contents(NamedTuple):
    """What a request has in the door's memory. parts, holes: of inputs on the engine's GPU."""

    inputs: Any
    description: bytes
    parts: bytes
    holes: tuple[Slice, ...]
    names_version: bool
    deadline: float | None


@dataclass(slots=True)
class _SentRequest:
    """A request in the door's memory. since: time.monotonic(). times: how often sent."""

    ask: Ask
    since: float
    pending: Pending
    times: int = 0


@dataclass(slots=True)
class _QueuedRequest:
    """A request that waits for room in the door's memory. since: time.monotonic()."""

    size: int
    since: float
    pending: Pending
    contents: _Contents


class EngineLink:
    """A door's link to its engine. Belongs to one event loop, but for `attach`. live: model → the engine's
    description of the served version. described: (model, state) → the same for attached states. cache: the
    engine's, or None."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._models: dict[str, None] = {}  # in the order in which the engine is to place them
        self._memory = SharedMemory.create(
            "tableside-requests", max(REQUESTS_BYTES, 2 * settings.max_body_bytes)
        )
        self._held = self._memory.view
        self._blocks = Blocks(self._memory.size)
        self._answers: SharedMemory | None = None
        self._connection: Connection | None = None
        self._is_ready = asyncio.Event()
        self._numbers = 0
        self._asked: dict[int, _SentRequest] = {}
        self._waiting: list[_QueuedRequest] = []  # for room, oldest first
        self._coming: dict[tuple[Any, ...], asyncio.Future[dict[str, Any]]] = {}  # from the engine
        self._refused: ApiError | None = None  # why the engine does not serve this door's models
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: asyncio.Task[None] | None = None
        self._moved: dict[str, int] = {}
        self.live: dict[str, dict[str, Any]] = {}
        self.described: dict[tuple[str, int], dict[str, Any]] = {}
        self.cache: CacheState | None = None

    async def open(self, models: Iterable[str]) -> None:
        """Connects and waits until the engine serves these models. ApiError: it cannot."""
        self._models = dict.fromkeys(models)
        self._loop = asyncio.get_running_loop()
        self._connect()
        self._looking = self._loop.create_task(self._look())
        await self._is_ready.wait()
        if self._refused is not None:
            raise self._refused

    @property
    def is_ready(self) -> bool:
        return self._is_ready.is_set() and self._refused is None

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._connection is not None:
            self._connection.close()

    # ---- requests ----

    def begin(self, request: Request, inputs: Any) -> Answer | Pending:
        """As of `CpuExecutor`. inputs: some may lie on the engine's GPU (`PartlyOnDevice`)."""
        if request.is_small:
            return request.look_up(inputs)
        parts: bytes = b""
        holes: tuple[Slice, ...] = ()
        at, pending = None, Pending()
        if isinstance(inputs, PartlyOnDevice):
            parts, holes, inputs = parts_of(inputs), inputs.reads, inputs.inputs
        said = request.names_version, request.deadline
        contents = _Contents(inputs, describe(request), parts, holes, *said)
        size = messages.bytes_of(*contents[:3])
        if not self._waiting:  # first come, first served
            at = self._blocks.take(size)
        if at is None:
            self._queue(_QueuedRequest(size, time.monotonic(), pending, contents))
        else:
            self._ask(at, contents, pending)
        return pending

    def _ask(self, at: int, contents: _Contents, pending: Pending) -> None:
        """Writes a request to the door's memory and sends it."""
        inputs, description, parts, holes, names_version, deadline = contents
        self._numbers += 1
        sizes, until = (len(inputs), len(description), len(parts)), int(1e9 * (deadline or 0))
        ask = Ask(self._numbers, at, *sizes, names_version, until)
        given = memoryview(inputs).cast("B")
        for first, end in between(holes, len(given)):
            self._held[at + first : at + end] = given[first:end]
        described_at, parts_at, _ = messages.places_of(ask)
        for begin, said in ((described_at, description), (parts_at, parts)):
            self._held[begin : begin + len(said)] = said
        asked = self._asked[ask.number] = _SentRequest(ask, time.monotonic(), pending)
        self._send(asked)

    def _queue(self, asked: _QueuedRequest) -> None:
        """Keeps a request until there is room. ApiError 503: there is none in time, or for so many."""
        if asked.size > self._memory.size:
            raise overloaded(f"the request takes {asked.size:,} bytes of {self._memory.size:,} for all")
        if len(self._waiting) >= self._settings.max_waiting:
            raise overloaded(f"{len(self._waiting)} requests wait for room, the limit (max_waiting)")
        asked.contents = asked.contents._replace(inputs=kept(asked.contents.inputs))
        self._waiting.append(asked)

    def _give_back(self, at: int) -> None:
        self._blocks.give_back(at)
        while self._waiting:
            first = self._waiting[0]
            if not first.pending.is_told:  # as one is that waited too long
                if (room := self._blocks.take(first.size)) is None:
                    return
                self._ask(room, first.contents, first.pending)
            self._waiting.pop(0)

    def _send(self, asked: _SentRequest) -> None:
        """Sends a request, or leaves it for the next engine."""
        if self._connection is not None and self.is_ready:
            asked.times += 1
            self._connection.post(MessageKind.ASKS, messages.ASK.pack(*asked.ask))

    def _answered(self, answer: AnswerMessage) -> None:
        memory, connection = self._answers, self._connection
        assert memory is not None and connection is not None, "the engine said hello first"
        asked = self._asked.pop(answer.number, None)
        told = orjson.loads(answer.told) if answer.told else {}
        if asked is not None:
            self._give_back(asked.ask.at)
        if "error" in told:
            if asked is not None:
                asked.pending.tell(_error(told["error"]))
            return
        give_back = partial(connection.release, answer.number)
        buffer = np.asarray(Lent(memory, answer.at, answer.size, give_back))
        if asked is not None:
            unfound = told.get("unfound")
            state = State.numbered(told["state"]) if "state" in told else None
            asked.pending.tell(
                Answer(buffer, None if unfound is None else [Unfound(*u) for u in unfound], state)
            )

    # ---- the connection ----

    def _connect(self) -> None:
        try:
            sock = messages.connect(self._settings.engine)
        # the supervisor, which holds the address, is gone: this worker ends as well
        except (OSError, ServingError) as error:
            logger.error("the engine process cannot be reached: %s", error)
            return
        self._connection = Connection(sock, self._read, self._ended)
        self._connection.control({"hello": [*self._models]}, [self._memory.fd])

    def _ended(self) -> None:
        """Connects to the successor of an ended engine, at the same address."""
        logger.warning("the engine process ended; requests wait for its successor")
        self._is_ready.clear()
        for asked in list(self._asked.values()):
            if asked.times >= _MOST_ASKED or asked.pending.is_told:
                self._refuse(asked, overloaded(f"{_MOST_ASKED} engine processes ended over this request"))
        for coming in self._coming.values():
            coming.set_exception(overloaded("the engine process ended"))
        self._coming.clear()
        self.described.clear()
        self._connect()

    def _read(self, message: bytes, descriptors: list[int]) -> None:
        if message[0] == MessageKind.ANSWERS:
            for answer in messages.read_answers(message):
                self._answered(answer)
            return
        told = orjson.loads(message[1:])
        if "refused" in told:
            messages.close_all(descriptors)
            self._refused = _error(told["refused"])
            if self.live:  # an engine before it served them; this worker's successor says what there is now
                logger.error(
                    "the engine process does not serve this worker's models: %s", self._refused.message
                )
                os.kill(os.getpid(), signal.SIGTERM)
            self._is_ready.set()
        elif "hello" in told:
            (fd,) = descriptors
            self._answers = SharedMemory(fd)
            self._refused = None
            for live in told["hello"]:
                self._learn(live)
            self._is_ready.set()
            for asked in self._asked.values():
                self._send(asked)
            for model, state in self._moved.items():
                self._tell_moved(model, state)
        elif "live" in told:
            self._learn(told["live"])
        elif "attached" in told:
            self._has_attached(told)
        elif "region" in told:
            self._came(("region", told["region"]), told)
        if told.get("cache") is not None:
            self.cache = CacheState(*told["cache"])

    def _learn(self, live: dict[str, Any]) -> None:
        self.live[live["model"]] = live
        self._describe(live["model"], live["state"], live)

    def _describe(self, model: str, state: int, told: dict[str, Any]) -> None:
        """Keeps the engine's description of a state, the latest _DESCRIBED of them."""
        self.described.pop((model, state), None)
        self.described[model, state] = told
        while len(self.described) > _DESCRIBED:
            del self.described[next(iter(self.described))]

    # ---- versions ----

    def moved(self, model: str, state: int) -> None:
        """Tells the engine which state, by number, this door asks for now. Any thread may call."""
        assert self._loop is not None, "the link is open"
        self._moved[model] = state
        self._loop.call_soon_threadsafe(self._tell_moved, model, state)

    def _tell_moved(self, model: str, state: int) -> None:
        if self._connection is not None and self.is_ready:
            self._connection.control({"moved": [model, state]})

    def leave(self, model: str) -> None:
        self._models.pop(model, None)
        self._moved.pop(model, None)
        self.live.pop(model, None)
        if self._connection is not None and self.is_ready:
            self._connection.control({"left": model})

    def attach(self, model: str, state: int) -> dict[str, Any]:
        """Makes the engine attach a state by number, or (0) serve the model; returns its description. Blocks:
        not for the event loop. ApiError: it cannot."""
        assert self._loop is not None
        asking = self._wait_for(("attach", model, state), {"attach": [model, state]})
        return asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    async def _wait_for(self, key: tuple[Any, ...], message: dict[str, Any]) -> dict[str, Any]:
        """Sends a message unless a caller waits for the same already; returns what the engine said of it.
        ApiError: an error, or the engine is gone."""
        if (coming := self._coming.get(key)) is None:
            if self._connection is None or not self.is_ready:
                raise overloaded("the engine process is being replaced")
            coming = self._coming[key] = asyncio.get_running_loop().create_future()
            self._connection.control(message)
        return await asyncio.shield(coming)

    def _came(self, key: tuple[Any, ...], told: dict[str, Any]) -> None:
        if (coming := self._coming.pop(key, None)) is not None:
            settle(coming, _error(told["error"]) if told.get("error") else told)

    def _has_attached(self, told: dict[str, Any]) -> None:
        model, state = told["attached"]
        if "error" not in told:
            if state:
                self._describe(model, state, told)
            else:
                self._models[model] = None
                self._learn(told)
        self._came(("attach", model, state), told)

    # ---- regions ----

    async def open_region(self, name: str) -> None:
        """Makes the engine open a region on its GPU. ApiError: it cannot."""
        await self._wait_for(("region", name), {"region": name})

    # ---- deadlines ----

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for asked in list(self._asked.values()):
                if now - asked.since > TIMEOUT_S:
                    error = overloaded(f"the engine process did not answer within {TIMEOUT_S:g} s")
                    self._refuse(asked, error)
            for waiting in self._waiting:
                if now - waiting.since > self._settings.max_wait_s:
                    waiting.pending.tell(overloaded("the request waited too long for room (max_wait_s)"))

    def _refuse(self, asked: _SentRequest, error: ApiError) -> None:
        """Refuses a request. A live engine may still read its inputs, which stay until it answers."""
        asked.pending.tell(error)
        if not self.is_ready:
            del self._asked[asked.ask.number]
            self._give_back(asked.ask.at)


def _error(fields: list[Any]) -> ApiError:
    status, kind, message, lacking = fields
    return ApiError(status, ErrorKind(kind), message, lacking)
