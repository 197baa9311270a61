"""A door's end of the connection to its engine: it sends requests, waits for answers, and connects anew where
that one ended.

Requests lie in the door's own memory until they are answered. So those that an engine left behind are asked
again of its successors, twice at most. A request that waits longer than TIMEOUT_S is answered 503.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import orjson

from tableside.loader.versions.states import State
from tableside.quant.contract import Unfound
from tableside.serving.engine_process import messages
from tableside.serving.engine_process.described import describe
from tableside.serving.engine_process.device_regions import parts_of
from tableside.serving.engine_process.memory import Blocks, Lent, SharedMemory
from tableside.serving.engine_process.messages import AnswerMessage, Ask, Connection, MessageKind
from tableside.serving.errors import ApiError, ErrorKind, ServingError
from tableside.serving.executors.admission import overloaded
from tableside.serving.executors.executors import Executor
from tableside.serving.model.engine import CacheState
from tableside.serving.model.request import Answer, Request
from tableside.serving.settings import ServerSettings
from tableside.serving.shm.regions import PartlyOnDevice, Slice

logger = logging.getLogger("tableside")

Done = Callable[[Answer | Exception], None]

TIMEOUT_S = 30.0  # that a request waits for an engine process, or for its successor
REQUESTS_BYTES = 128 << 20  # of memory for a door's requests, at least
_LOOK_S = 0.1
_DESCRIBED = 64  # states of all models that what the engine said of is kept
_MOST_ASKED = 3  # times that a request is sent: it may be what ends engines


@dataclass(slots=True)
class _PendingRequest:
    """A request under way. since: of time.monotonic. times: it was sent.

    done: gets the answer, or why there is none; None: it was told.
    """

    ask: Ask
    since: float
    done: Done | None
    times: int = 0

    def tell(self, found: Answer | Exception) -> None:
        """Tells whoever waits, once."""
        if (done := self.done) is not None:
            self.done = None
            done(found)


@dataclass
class _QueuedRequest:
    """A request that waits for room in this door's memory. since: of time.monotonic."""

    size: int
    since: float
    room: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EngineLink(Executor):
    """The way of one door to its engine. Belongs to one event loop, but for `attach`.

    live: model → what the engine says of the version that it serves. described: (model, version) → the same
    of any version that it attached. cache: what it says of its cache, or None.
    """

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
        self._asked: dict[int, _PendingRequest] = {}
        self._waiting: list[_QueuedRequest] = []  # for room, oldest first
        self._attaching: dict[tuple[str, int], Future[dict[str, Any]]] = {}
        self._opening: dict[str, asyncio.Future[None]] = {}  # regions, by name
        self._refused: ApiError | None = None  # why the engine does not serve this door's models
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: asyncio.Task[None] | None = None
        self._moved: dict[str, int] = {}
        self.live: dict[str, dict[str, Any]] = {}
        self.described: dict[tuple[str, int], dict[str, Any]] = {}
        self.cache: CacheState | None = None

    async def open(self, models: Iterable[str]) -> None:
        """Connects, and waits until the engine serves these models. ApiError: it cannot."""
        self._models = dict.fromkeys(models)
        self._loop = asyncio.get_running_loop()
        self._connect()
        self._looking = self._loop.create_task(self._look())
        await self._is_ready.wait()
        if self._refused is not None:
            raise self._refused

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine that answers."""
        return self._is_ready.is_set() and self._refused is None

    def end_if_lost(self) -> bool:
        return False  # the engine ends itself, and is replaced

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._connection is not None:
            self._connection.close()

    # ---- requests ----

    def run_now(self, request: Request, inputs: Any) -> Answer | None:
        if not request.is_small:
            return None
        request.check(inputs)
        return request.look_up(inputs)

    def run(self, request: Request, inputs: Any) -> Coroutine[Any, Any, Answer]:
        """As of any executor. inputs: some may lie in regions of the engine's GPU (`PartlyOnDevice`)."""
        request.check(inputs.inputs if isinstance(inputs, PartlyOnDevice) else inputs)
        return self._run(request, inputs)

    def run_soon(self, request: Request, inputs: Any, done: Done) -> bool:
        if isinstance(inputs, PartlyOnDevice):
            return False
        request.check(inputs)
        description = describe(request)
        at = None if self._waiting else self._blocks.take(_bytes_of(inputs, description))
        if at is None:
            return False
        self._ask(at, inputs, description, done, names_version=request.names_version)
        return True

    async def _run(self, request: Request, inputs: Any) -> Answer:
        if request.is_small:
            return request.look_up(inputs)
        description, parts, names_version = describe(request), b"", request.names_version
        holes: tuple[Slice, ...] = ()
        if isinstance(inputs, PartlyOnDevice):
            parts, holes, inputs = parts_of(inputs), inputs.reads, inputs.inputs
        size = _bytes_of(inputs, description, parts)
        at = self._blocks.take(size) if not self._waiting else None
        if at is None:
            at = await self._room(size)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._ask(at, inputs, description, partial(_settle, answer), parts, holes, names_version)
        return await answer

    def _ask(
        self,
        at: int,
        inputs: Any,
        description: bytes,
        done: Done,
        parts: bytes = b"",
        holes: Sequence[Slice] = (),
        names_version: bool = False,
    ) -> None:
        """Writes a request to this door's memory, where there is room for it, and sends it. parts, holes:
        what of the inputs lies in regions of the engine's GPU. names_version: as of `Request`."""
        self._numbers += 1
        ask = Ask(self._numbers, at, len(inputs), len(description), len(parts), names_version)
        given = memoryview(inputs).cast("B")
        for first, end in _between(holes, len(given)):
            self._held[at + first : at + end] = given[first:end]
        described_at, parts_at, _ = messages.places_of(ask)
        for begin, said in ((described_at, description), (parts_at, parts)):
            self._held[begin : begin + len(said)] = said
        asked = self._asked[ask.number] = _PendingRequest(ask, time.monotonic(), done)
        self._send(asked)

    async def _room(self, size: int) -> int:
        """Room in this door's memory, after those that waited before. ApiError 503: there is none in time."""
        if size > self._memory.size:
            raise overloaded(f"the request takes {size:,} bytes of {self._memory.size:,} for all")
        if len(self._waiting) >= self._settings.max_waiting:
            raise overloaded(f"{len(self._waiting)} requests wait for room, the limit (max_waiting)")
        self._waiting.append(waiting := _QueuedRequest(size, time.monotonic()))
        return await waiting.room

    def _give_back(self, at: int) -> None:
        self._blocks.give_back(at)
        while self._waiting:
            first = self._waiting[0]
            if first.room.done():  # its client left, or it waited too long
                self._waiting.pop(0)
            elif (room := self._blocks.take(first.size)) is None:
                return
            else:
                self._waiting.pop(0)
                first.room.set_result(room)

    def _send(self, asked: _PendingRequest) -> None:
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
                asked.tell(_error(told["error"]))
            return
        give_back = partial(_give_answer_back, self._loop, connection, answer.number)
        buffer = np.asarray(Lent(memory, answer.at, answer.size, give_back))
        if asked is not None:
            unfound = told.get("unfound")
            state = State.numbered(told["state"]) if "state" in told else None
            asked.tell(Answer(buffer, None if unfound is None else [Unfound(*u) for u in unfound], state))

    # ---- the connection ----

    def _connect(self) -> None:
        try:
            sock = messages.connect(self._settings.engine)
        except (
            OSError,
            ServingError,
        ) as error:  # the supervisor, which holds the address, is gone: this worker ends as well
            logger.error("the engine process cannot be reached: %s", error)
            return
        self._connection = Connection(sock, self._read, self._ended)
        self._connection.control({"hello": [*self._models]}, [self._memory.fd])

    def _ended(self) -> None:
        """The engine is gone. Its successor takes the same address, so connecting to it needs no waiting."""
        logger.warning("the engine process ended; requests wait for its successor")
        self._is_ready.clear()
        for asked in list(self._asked.values()):
            if asked.times >= _MOST_ASKED or asked.done is None:
                self._refuse(asked, overloaded(f"{_MOST_ASKED} engine processes ended over this request"))
        for attaching in self._attaching.values():
            attaching.set_exception(overloaded("the engine process ended"))
        self._attaching.clear()
        for opening in self._opening.values():
            opening.set_exception(overloaded("the engine process ended"))
        self._opening.clear()
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
        elif "region" in told and (opening := self._opening.pop(told["region"], None)) is not None:
            _settle_opening(opening, told["error"])
        if told.get("cache") is not None:
            self.cache = CacheState(*told["cache"])

    def _learn(self, live: dict[str, Any]) -> None:
        self.live[live["model"]] = live
        self._describe(live["model"], live["state"], live)

    def _describe(self, model: str, state: int, told: dict[str, Any]) -> None:
        """Keeps what the engine said of a state, of `_DESCRIBED` that came last: changes make a new one
        every second."""
        self.described.pop((model, state), None)
        self.described[model, state] = told
        while len(self.described) > _DESCRIBED:
            del self.described[next(iter(self.described))]

    # ---- versions ----

    def moved(self, model: str, state: int) -> None:
        """Tells the engine that this door asks for a state, by its number, from now on. Any thread may
        call."""
        assert self._loop is not None, "the link is open"
        self._moved[model] = state
        self._loop.call_soon_threadsafe(self._tell_moved, model, state)

    def _tell_moved(self, model: str, state: int) -> None:
        if self._connection is not None and self.is_ready:
            self._connection.control({"moved": [model, state]})

    def leave(self, model: str) -> None:
        """Tells the engine that this door serves a model no more."""
        self._models.pop(model, None)
        self._moved.pop(model, None)
        self.live.pop(model, None)
        if self._connection is not None and self.is_ready:
            self._connection.control({"left": model})

    def attach(self, model: str, state: int) -> dict[str, Any]:
        """Has the engine attach a state, by its number, or (0) serve the model; what it says of it. ApiError:
        it cannot.

        Not to be called on the event loop, as it waits.
        """
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._attach(model, state), self._loop).result()

    async def _attach(self, model: str, state: int) -> dict[str, Any]:
        key = model, state
        if (coming := self._attaching.get(key)) is None:
            if self._connection is None or not self.is_ready:
                raise overloaded("the engine process is being replaced")
            coming = self._attaching[key] = Future()
            self._connection.control({"attach": [model, state]})
        return await asyncio.wrap_future(coming)

    def _has_attached(self, told: dict[str, Any]) -> None:
        model, state = told["attached"]
        coming = self._attaching.pop((model, state), None)
        if "error" in told:
            if coming is not None:
                coming.set_exception(_error(told["error"]))
            return
        if state:
            self._describe(model, state, told)
        else:
            self._models[model] = None
            self._learn(told)
        if coming is not None:
            coming.set_result(told)

    # ---- regions ----

    async def open_region(self, name: str) -> None:
        """Has the engine open a region of its GPU's memory that is registered. ApiError: it cannot."""
        if (opening := self._opening.get(name)) is None:
            if self._connection is None or not self.is_ready:
                raise overloaded("the engine process is being replaced")
            opening = self._opening[name] = asyncio.get_running_loop().create_future()
            self._connection.control({"region": name})
        await asyncio.shield(opening)

    # ---- deadlines ----

    async def _look(self) -> None:
        """Refuses what waits for too long, whether an engine hangs, is replaced, or there is no room."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for asked in list(self._asked.values()):
                if now - asked.since > TIMEOUT_S:
                    error = overloaded(f"the engine process did not answer within {TIMEOUT_S:g} s")
                    self._refuse(asked, error)
            for waiting in self._waiting:
                if now - waiting.since > self._settings.max_wait_s and not waiting.room.done():
                    waiting.room.set_exception(
                        overloaded("the request waited too long for room (max_wait_s)")
                    )

    def _refuse(self, asked: _PendingRequest, error: ApiError) -> None:
        """Answers a request without its engine. An engine that lives may still read its inputs, which stay
        until it answers."""
        asked.tell(error)
        if not self.is_ready:
            del self._asked[asked.ask.number]
            self._give_back(asked.ask.at)


def _bytes_of(inputs: Any, description: bytes, parts: bytes = b"") -> int:
    """What a request takes of the memory."""
    return -(-len(inputs) // 8) * 8 + -(-len(description) // 8) * 8 + len(parts)


def _settle(answer: "asyncio.Future[Answer]", found: Answer | Exception) -> None:
    if answer.done():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def _give_answer_back(loop: asyncio.AbstractEventLoop | None, connection: Connection, number: int) -> None:
    """Gives an answer's memory back, on whatever thread its last array goes."""
    if not connection.is_open or loop is None:
        return
    record = messages.NUMBER.pack(number)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not loop.is_closed():
            loop.call_soon_threadsafe(connection.post_late, MessageKind.RELEASED, record)
        return
    connection.post_late(MessageKind.RELEASED, record)


def _between(holes: Sequence[Slice], end: int) -> Iterator[tuple[int, int]]:
    """The bytes of [0, end) that lie in none of the holes, as (first, after the last)."""
    at = 0
    for hole in sorted(holes, key=lambda hole: hole.at):
        if hole.at > at:
            yield at, hole.at
        at = hole.at + hole.size
    if at < end:
        yield at, end


def _settle_opening(opening: "asyncio.Future[None]", error: list[Any] | None) -> None:
    if opening.done():
        return
    if error is None:
        opening.set_result(None)
    else:
        opening.set_exception(_error(error))


def _error(fields: list[Any]) -> ApiError:
    status, kind, message, lacking = fields
    return ApiError(status, ErrorKind(kind), message, lacking)
