"""A GPU's engine process: attaches versions, keeps them placed and warm, and answers its doors."""

import asyncio
import functools
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import uvloop
from uvicorn.config import STARTUP_FAILURE

from tableside.loader.versions.states import State
from tableside.quant import QuantError, choose
from tableside.serving.damage import ReadDamage
from tableside.serving.engine_process.described import DescribedRequests, RequestTarget, model_key
from tableside.serving.engine_process.device_regions import DeviceRegions
from tableside.serving.engine_process.doors import AnswerMemory, Doors, tell
from tableside.serving.errors import UNUSABLE, ApiError, not_found
from tableside.serving.executors.admission import overloaded
from tableside.serving.executors.batching import Batcher
from tableside.serving.metrics.disk import count_reads, count_remote, count_sample
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.places import Buffer
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings
from tableside.serving.shm.regions import RegionRegistry
from tableside.serving.supervised import answer, take_signals
from tableside.serving.watch import Watch

if TYPE_CHECKING:
    from tableside.serving.workers.worker import WorkerConfig

logger = logging.getLogger("tableside")

NAME = "tableside-gpu"  # of the process, as ps and top show it; the device follows
SWITCH_S = (
    1e-4  # for which the event loop, or the GPU's thread, keeps the other one waiting; 5 ms are Python's own
)
ANSWERS_BYTES = 512 << 20  # of page-locked memory for answers, at least
STATUS_S = 1.0  # between two looks at the cache's counters


class EngineHost:
    """The engine process's work. settings: with one device. listening: for doors. registry: clients' regions;
    None: not allowed. started: it accepts doors. is_ending: it was asked to end."""

    batcher: Batcher
    regions: DeviceRegions

    def __init__(
        self, settings: ServerSettings, listening: socket.socket, registry: RegionRegistry | None = None
    ) -> None:
        self._settings, self._listening, self._registry = settings, listening, registry
        self.started = self.is_ending = False
        self._placer = Placer(
            settings,
            choose(settings.backend),
            count_reads=count_reads,
            count_remote=count_remote,
            count_sample=count_sample,
        )
        self._engines: dict[int, Engine] = {}  # by the key of the model
        self._layouts: WeakKeyDictionary[ServedVersion, DescribedRequests] = WeakKeyDictionary()
        self._was_usable: dict[int, bool] = {}
        self._served: dict[int, ServedVersion] = {}
        self._replaced: dict[tuple[int, int], ServedVersion] = {}  # that a door may still ask for
        self._attaching = asyncio.Lock()

    async def run(self) -> None:
        """Serves until asked to end. QuantError: the device cannot be used."""
        ending = asyncio.Event()
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, self._end, ending)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._placer.open)
        gpu, s = self._placer.gpu, self._settings
        assert gpu is not None, "an engine process has a device"
        self.batcher = Batcher(gpu, s.max_batch, s.max_waiting, s.max_wait_s, tell=tell)
        self.regions = DeviceRegions(self._registry, gpu)
        answers = AnswerMemory(max(ANSWERS_BYTES, 2 * s.max_response_bytes))
        gpu.batches.write_answers_to(answers.memory.bytes, answers.take)
        self._doors = Doors(self, self._listening, answers)
        is_lost, engines = self.batcher.end_if_lost, self._engines.values
        watch = Watch(engines, s.poll_s, is_lost=is_lost, look=self._look, taken=self._taken)
        watch.start()
        reporting = loop.create_task(self._report())
        self._doors.start()
        self.started = True
        await ending.wait()
        reporting.cancel()
        await watch.stop()
        await self.batcher.finish()
        self._doors.stop()
        self.batcher.close()

    def _end(self, ending: asyncio.Event) -> None:
        self.is_ending = True
        ending.set()

    # ---- versions ----

    def read_inputs_in(self, memory: Buffer) -> None:
        """Page-locks a door's memory for large requests; without that they are copied twice."""
        assert self._placer.gpu is not None, "an engine process has a device"
        try:
            self._placer.gpu.batches.read_inputs_in(memory)
        except QuantError as error:
            logger.warning("requests of a worker are copied twice: %s", error)

    async def serve(self, models: Sequence[str]) -> dict[str, Any]:
        """Serves these models too; returns the hello to their door. ApiError: one cannot be served."""
        found = [await self._engine(name) for name in models]
        return {"hello": [self._live(engine) for engine in found], "cache": self._cache()}

    async def _engine(self, name: str) -> Engine:
        """Returns a model's engine, attached if new. ApiError: it cannot be served."""
        async with self._attaching:
            if (known := self._engines.get(key := model_key(name))) is not None:
                return known
            try:
                engine = Engine.of(self._settings, name, self._placer)
                await asyncio.get_running_loop().run_in_executor(None, engine.begin)
            except UNUSABLE as error:
                logger.error("model %s cannot be served: %s", name, error)
                raise not_found(
                    f"model {name!r} cannot be served; the server's log has the reason"
                ) from error
            self._engines[key], self._served[key], self._was_usable[key] = engine, engine.served(), True
            return engine

    def _live(self, engine: Engine) -> dict[str, Any]:
        return {**_told(engine.attached()), "unusable": engine.unusable_because}

    def _look(self) -> None:
        """Tells doors about versions that became unusable or usable; closes regions that are gone."""
        self.regions.look()
        for key, engine in self._engines.items():
            if engine.is_usable is not self._was_usable[key]:
                self._was_usable[key] = engine.is_usable
                self._doors.tell({"live": self._live(engine)})

    def _taken(self, engine: Engine) -> None:
        """Keeps a replaced version until all doors have moved."""
        key = model_key(engine.model.name)
        replaced, self._served[key] = self._served[key], engine.served()
        self._replaced[key, replaced.state.number] = replaced
        self._doors.tell({"live": self._live(engine)})
        self.moved()

    def moved(self) -> None:
        """Drops replaced versions that no door asks for, and models that none serves."""
        doors = self._doors.open
        for key, engine in list(self._engines.items()):
            name = engine.model.name
            if doors and not any(name in door.uses for door in doors):
                del self._engines[key], self._served[key], self._was_usable[key]
                self._replaced = {k: v for k, v in self._replaced.items() if k[0] != key}
                logger.info("model %s is let go", name)
        for key, state in list(self._replaced):
            engine = self._engines[key]
            live = engine.attached().state.number
            if all(
                door.moved.get(engine.model.name) == live for door in doors if engine.model.name in door.uses
            ):
                del self._replaced[key, state]

    def layouts(self, wanted: RequestTarget, names_version: bool) -> DescribedRequests | None:
        """Returns the requests of the wanted state if it is attached, else of the present one (or of the
        named version's) if it has that layout; else None."""
        if (engine := self._engines.get(wanted.model)) is None:
            return None
        state = State.numbered(wanted.state)
        served = engine.find_state(state) or self._replaced.get((wanted.model, wanted.state))
        if served is None:
            served = engine.find(state.version) if names_version else engine.attached()
            if served is None or served.layout != wanted.layout:
                return None
        if (known := self._layouts.get(served)) is None:
            known = self._layouts[served] = DescribedRequests(served)
        return known

    async def attach(self, model: str, state: int) -> dict[str, Any]:
        """Attaches a state by number, or (0) the live one; returns its description. ApiError: it cannot."""
        engine = await self._engine(model)
        if not state:
            return self._live(engine)
        wanted = State.numbered(state)
        async with self._attaching:
            if (served := engine.find_state(wanted)) is None:
                attach = functools.partial(engine.attach_explicit, wanted.version, wanted)
                served = await asyncio.get_running_loop().run_in_executor(None, attach)
        return _told(served)

    async def attach_again(self, wanted: RequestTarget, names_version: bool) -> DescribedRequests:
        """Attaches a state that went, for a request that the present one cannot answer. ApiError: it cannot;
        503 if the request names no version: a retry is laid out anew."""
        if (engine := self._engines.get(wanted.model)) is None:
            raise not_found("the model of this request is not served any more")
        try:
            await self.attach(engine.model.name, wanted.state)
        except ApiError as error:
            if names_version:
                raise
            raise overloaded("the model was replaced by a version with other features meanwhile") from error
        layouts = self.layouts(wanted, names_version=True)
        assert layouts is not None, "it was attached"
        return layouts

    # ---- what doors show ----

    async def _report(self) -> None:
        read_damage = ReadDamage()
        while True:
            await asyncio.sleep(STATUS_S)
            for engine in list(self._engines.values()):
                try:
                    read_damage.mark(engine)
                except UNUSABLE as error:  # it is tried again
                    logger.error("a damaged version of %s is not marked: %s", engine.model.name, error)
            if self._placer.cache is not None:
                self.batcher.count_cache(wait=True)
                self._doors.tell({"cache": self._cache()})

    def _cache(self) -> list[Any] | None:
        cache = next((engine.cache for engine in self._engines.values()), None)
        return None if cache is None else list(cache)


def _told(served: ServedVersion) -> dict[str, Any]:
    scorer = served.scorer
    return {
        "model": served.header.model,
        "state": served.state.number,
        "backend": served.backend.description,
        "placements": dict(served.placed.placements),
        "hbm_bytes": served.placed.hbm_bytes,
        "is_counted": served.placed.is_counted,
        "verified_at": served.verified_at,
        "scorer": None
        if scorer is None
        else {"width": scorer.width, "runs_on": scorer.runs_on, "dtype": scorer.dtype},
        "unusable": "",
    }


def run_engine(config: "WorkerConfig", sockets: list[socket.socket], pipe: Pipe) -> None:
    """Runs an engine process. sockets: the one for doors."""
    take_signals()
    config.configure_logging()
    (device,) = config.settings.devices
    Path("/proc/self/comm").write_text(f"{NAME}{device}")
    sys.setswitchinterval(SWITCH_S)
    (listening,) = sockets
    listening.setblocking(False)
    try:
        host = EngineHost(config.settings, listening, config.registry)
        answer(host, pipe)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(host.run())
    except UNUSABLE as error:
        logger.error("the engine process cannot start: %s", error)
        sys.exit(STARTUP_FAILURE)
