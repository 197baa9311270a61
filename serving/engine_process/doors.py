"""The engine's end of its doors' connections: requests come in, are batched, and answers go out."""

import asyncio
import logging
import socket
import struct
import threading
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from tableside.quant import QuantError
from tableside.quant.device.addresses import address_of
from tableside.serving.engine_process import described, messages
from tableside.serving.engine_process.described import DescribedRequests, RequestTarget
from tableside.serving.engine_process.memory import Blocks, Lent, SharedMemory
from tableside.serving.engine_process.messages import Connection, MessageKind
from tableside.serving.errors import INTERNAL_ERROR, ApiError, DeviceLost, ErrorKind, ServingError
from tableside.serving.executors.batching import Asked, Told
from tableside.serving.model.places import Buffer
from tableside.serving.model.request import Answer

if TYPE_CHECKING:
    from tableside.serving.engine_process.main import EngineHost  # imports this

logger = logging.getLogger("tableside")


class _Came(NamedTuple):
    """A request as it came. names_version, deadline: as of `Request`."""

    reply: "Reply"
    wanted: RequestTarget
    names_version: bool
    deadline: float | None
    description: bytes
    inputs: memoryview
    parts: bytes


# what a message may raise
_NONSENSE = (ServingError, ValueError, KeyError, IndexError, TypeError, OSError, struct.error)
MOST_DOORS = 1024  # of an engine: workers, their successors, and whoever else of this user connects
HELLO_S = 10.0  # until a door has said what it is
_WAIT_S = 2.0  # for doors to give memory of answers back; a door that reads so slowly is refused


class AnswerMemory:
    """The engine's memory for answers; doors map it. Any thread may call."""

    def __init__(self, size: int) -> None:
        self.memory = SharedMemory.create("tableside-answers", size)
        self._blocks = Blocks(size)
        # an array may be let go while its thread holds it
        self._changed = threading.Condition(threading.RLock())

    def take(self, size: int) -> Buffer:
        """Takes `size` bytes for as long as an array over them lives; waits if there is no room. ApiError
        503: doors hold too many answers."""
        with self._changed:
            deadline = time.monotonic() + _WAIT_S
            while (at := self._blocks.take(size)) is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise ApiError(
                        503,
                        ErrorKind.OVERLOADED,
                        f"answers that clients read take {self._blocks.held:,} bytes and this one {size:,}; "
                        f"the engine has {self.memory.size:,}; try again later",
                    )
        return np.asarray(Lent(self.memory, at, size, partial(self._give_back, at)))

    def _give_back(self, at: int) -> None:
        with self._changed:
            self._blocks.give_back(at)
            self._changed.notify_all()


class DoorConnection:
    """A door as its engine sees it. uses: its models. moved: model → the state it asks for now."""

    def __init__(self, doors: "Doors", sock: socket.socket) -> None:
        self._doors = doors
        self.connection = Connection(sock, self._read, self._end)
        self.uses: set[str] = set()
        self.moved: dict[str, int] = {}
        self._silent = asyncio.get_running_loop().call_later(HELLO_S, self._leave, "it said no hello")
        self._memory: SharedMemory | None = None
        self._answers: dict[int, Buffer] = {}  # that the door may still read

    def _leave(self, why: object) -> None:
        logger.error("a worker sent its engine what is no message, and is left: %s", why)
        self.connection.close()
        self._end()

    def _end(self) -> None:
        self._silent.cancel()
        self._answers.clear()
        self._memory = None  # now, and not when this object's cycle of references is found
        self._doors.ended(self)

    def _read(self, message: bytes, descriptors: list[int]) -> None:
        try:
            self._take(message, descriptors)
        except _NONSENSE as error:
            messages.close_all(descriptors)
            self._leave(repr(error))

    def _take(self, message: bytes, descriptors: list[int]) -> None:
        match message[0]:
            case MessageKind.ASKS:
                self._ask_all(message)
            case MessageKind.RELEASED:
                for number in messages.read_numbers(message):
                    self._answers.pop(number, None)
            case MessageKind.CONTROL:
                self._control(orjson.loads(message[1:]), descriptors)
            case kind:
                raise ValueError(f"a message of kind {kind}")

    def _control(self, told: dict[str, Any], descriptors: list[int]) -> None:
        if "hello" in told:
            if (
                len(descriptors) != 1
                or self._memory is not None
                or not all(isinstance(m, str) for m in told["hello"])
            ):
                raise ValueError(
                    f"a hello with {len(descriptors)} descriptors, or a second one, or of what are no models"
                )
            self._memory = SharedMemory(descriptors.pop())
            self._silent.cancel()
            self.uses |= set(told["hello"])
            self._doors.later(self._greet(self._memory, told["hello"]))
            return
        if self._memory is None or descriptors:
            raise ValueError(
                f"a message before hello, or with {len(descriptors)} descriptors; expected a hello first"
            )
        if "left" in told:
            self.uses.discard(told["left"])
            self._doors.host.moved()
        elif "region" in told:
            self._doors.later(self._open(told["region"]))
        elif "moved" in told:
            model, state = _model_and_state(told["moved"])
            self.moved[model] = state
            self._doors.host.moved()
        else:
            model, state = _model_and_state(told["attach"])
            self._doors.later(self._attach(model, state))

    async def _greet(self, memory: SharedMemory, models: Sequence[str]) -> None:
        """Attaches the door's models, then answers its hello; refuses it if they cannot be."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._doors.host.read_inputs_in, memory.bytes)
            told = await self._doors.host.serve(models)
        except ApiError as error:
            told = {"refused": _fields(error)}
        self.connection.control(told, [self._doors.answers.memory.fd])

    async def _attach(self, model: str, state: int) -> None:
        asked = [model, state]
        self.uses.add(model)
        try:
            self.connection.control({"attached": asked, **await self._doors.host.attach(model, state)})
        except ApiError as error:
            self.connection.control({"attached": asked, "error": _fields(error)})

    async def _open(self, name: str) -> None:
        error = None
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._doors.host.regions.find, name)
        except ApiError as refused:
            error = _fields(refused)
        self.connection.control({"region": name, "error": error})

    # ---- requests ----

    def _ask_all(self, message: bytes) -> None:
        if self._memory is None:
            raise ValueError("requests before hello")
        held, size = self._memory.view, self._memory.size
        target: tuple[bytes, int] | None = None
        asked: list[Asked] = []
        for ask in messages.read_asks(message):
            begin, at, end = messages.places_of(ask)
            if end > size:
                raise ValueError(f"request {ask.number} does not lie in its memory of {size} bytes")
            description, inputs = bytes(held[begin : begin + ask.described]), held[ask.at : ask.at + ask.size]
            parts = bytes(held[at:end]) if ask.parts else b""
            named = description[: described.TARGET_BYTES], ask.names_version
            if named != target:  # as the request before it, mostly
                target, wanted = named, described.wanted_by(description)
                layouts = self._doors.host.layouts(wanted, bool(ask.names_version))
            said = bool(ask.names_version), ask.deadline / 1e9 if ask.deadline else None
            came = _Came(Reply(self, ask.number), wanted, *said, description, inputs, parts)
            if layouts is None:
                self._doors.later(self._ask_later(came))
            else:
                self._add(asked, came, layouts)
        if asked:
            self._doors.host.batcher.submit_all(asked)

    async def _ask_later(self, came: _Came) -> None:
        try:
            layouts = await self._doors.host.attach_again(came.wanted, came.names_version)
        except ApiError as error:
            came.reply.set_exception(error)
        else:
            asked: list[Asked] = []
            self._add(asked, came, layouts)
            self._doors.host.batcher.submit_all(asked)

    def _add(self, asked: list[Asked], came: _Came, layouts: DescribedRequests) -> None:
        reply, inputs, parts = came.reply, came.inputs, came.parts
        if layouts.state != came.wanted.state:
            reply.state = layouts.state
        try:
            request = layouts.request(came.description)
            given = self._doors.host.regions.elsewhere(request, inputs, parts) if parts else inputs
        except (QuantError, ApiError) as error:
            reply.set_exception(error)
        else:
            asked.append(Asked(request, given, reply, came.deadline))

    def answer(self, results: Sequence[tuple["Reply", Answer | BaseException]]) -> None:
        """Sends answers' places or errors, on any thread. The door gives answers' memory back."""
        records, first = [], self._doors.answers.memory.address
        for reply, result in results:
            if isinstance(result, Answer):
                self._answers[reply.number] = buffer = result.buffer
                at, size = address_of(buffer.data) - first if buffer.size else 0, buffer.size
                told = _told(result, reply.state)
            else:
                at, size, told = 0, 0, _refused(result)
            records.append(messages.ANSWER.pack(reply.number, at, size, len(told)) + told)
        self.connection.send_now(MessageKind.ANSWERS, records)
        if not self.connection.is_open:  # it went meanwhile: nobody gives these back
            self._answers.clear()


def tell(told: Told) -> None:
    """Sends a batch's results to the doors, one message each; on any thread."""
    of_door: dict[DoorConnection, list[tuple[Reply, Answer | BaseException]]] = {}
    for reply, result in told:
        assert isinstance(reply, Reply), "doors ask with these"
        if not reply.done():
            reply.is_done = True
            if not isinstance(result, DeviceLost):  # then this process ends, and the door asks its successor
                of_door.setdefault(reply.door, []).append((reply, result))
    for door, results in of_door.items():
        door.answer(results)


class Reply:
    """The batcher's future for a door's request. state: the number of the state that answers if it is not the
    request's; else 0."""

    __slots__ = ("door", "is_done", "number", "state")

    def __init__(self, door: DoorConnection, number: int) -> None:
        self.door, self.number, self.is_done, self.state = door, number, False, 0

    def done(self) -> bool:
        """Returns whether it was answered or its door is gone."""
        return self.is_done or not self.door.connection.is_open

    def set_result(self, answer: Answer) -> None:
        tell([(self, answer)])

    def set_exception(self, error: BaseException) -> None:
        tell([(self, error)])


class Doors:
    """An engine's doors. Belongs to one event loop."""

    def __init__(self, host: "EngineHost", listening: socket.socket, answers: AnswerMemory) -> None:
        self.host, self.answers, self._listening = host, answers, listening
        self.open: set[DoorConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listening.fileno())
        for door in list(self.open):
            door.connection.flush()
            door.connection.close()
        self.open.clear()

    def _accept(self) -> None:
        try:
            connection = messages.accept(self._listening)
            if len(self.open) < MOST_DOORS:
                self.open.add(DoorConnection(self, connection))
            else:
                connection.close()
                logger.error("an engine has %d doors, its limit; another one is refused", MOST_DOORS)
        except BlockingIOError:
            return
        except ServingError as error:
            logger.error("%s", error)

    def ended(self, door: DoorConnection) -> None:
        self.open.discard(door)
        self.host.moved()

    def tell(self, told: dict[str, Any]) -> None:
        for door in self.open:
            door.connection.control(told)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.get_running_loop().create_task(work))
        task.add_done_callback(self._tasks.discard)


def _told(answer: Answer, state: int) -> bytes:
    if answer.unfound is None and not state:
        return b""
    unfound = {} if answer.unfound is None else {"unfound": [tuple(u) for u in answer.unfound]}
    return orjson.dumps({**unfound, **({"state": state} if state else {})})


def _model_and_state(told: Any) -> tuple[str, int]:
    """Reads a message's model and state. ValueError: it is something else."""
    model, state = told
    if not isinstance(model, str) or type(state) is not int:
        raise ValueError(f"{told!r}: expected a model and the number of a state")
    return model, state


def _refused(error: BaseException) -> bytes:
    if not isinstance(error, ApiError):
        error = ApiError(500, ErrorKind.INTERNAL, INTERNAL_ERROR)  # the batcher logged it
    return orjson.dumps({"error": _fields(error)})


def _fields(error: ApiError) -> list[Any]:
    return [error.status, error.kind.value, error.message, error.lacking]
