"""A worker's state: its engines, its executor, and its readiness."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tableside.loader.errors import ModelError, VersionError
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.cluster.calls import close_hosts
from tableside.serving.engine_process.link import EngineLink
from tableside.serving.engine_process.versions import DoorEngine
from tableside.serving.errors import (
    UNUSABLE,
    ApiError,
    ErrorKind,
    bad_request,
    not_found,
    short,
)
from tableside.serving.executors.admission import CPU_SLOTS, Bytes, Slices, Slots
from tableside.serving.executors.executors import CpuExecutor
from tableside.serving.executors.pending import Readers
from tableside.serving.metrics import metrics
from tableside.serving.metrics.counters import Now
from tableside.serving.metrics.disk import count_reads, count_remote, count_sample
from tableside.serving.metrics.metrics import ERRORS
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.model_list import ModelList
from tableside.serving.service.sampling import SamplingExecutor
from tableside.serving.service.scrub import Scrubber
from tableside.serving.service.warm import Warmer
from tableside.serving.settings import ServerSettings, admin_token, cluster_token
from tableside.serving.shm.regions import RegionRegistry, Regions
from tableside.serving.watch import Watch

logger = logging.getLogger("tableside")

_Result = TypeVar("_Result")

_LOOK_S = 0.02  # between two looks whether all workers have followed a change


class Service:
    """A worker's engines by model name, their `executor`, and its limits (`slots`, `in_flight`). Belongs to
    one event loop. regions: shared memory of clients, or None. models: the shared list."""

    executor: CpuExecutor | EngineLink | SamplingExecutor

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.link = EngineLink(settings) if settings.devices else None
        self._backend = choose(settings.backend)
        self.engines: dict[str, Engine] = {}
        self.models = ModelList.of(settings.models)
        self.regions = Regions(RegionRegistry()) if settings.allow_client_shm else None
        self.admin_token, self.cluster_token = admin_token(settings), cluster_token(settings)
        self._changing, self._taken_generation, self._taken_serial = asyncio.Lock(), -1, 0
        self._following: asyncio.Task[None] | None = None
        self._scrubber = Scrubber(self.engines.values(), settings.scrub_hours * 3600)
        self._warmer = Warmer(self.engines.values(), settings.host_cache, settings.host_cache_s)
        self._is_open = False
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="tableside-beside")
        self.readers = Readers()
        slots = CPU_SLOTS if not settings.devices else max(CPU_SLOTS, 4 * settings.max_batch)
        self.slices = Slices()
        self.slots = Slots(slots, settings.max_waiting, settings.max_wait_s)
        self.in_flight = Bytes(settings.max_in_flight_bytes)
        self.large_json = asyncio.Lock()  # held while a large text is unpacked
        self._watch: Watch | None = None
        self._attaching = asyncio.Lock()

    def share(self, models: ModelList, registry: RegionRegistry | None) -> None:
        """Takes the lists shared by all workers, before `start`. registry: None: no regions."""
        self.models = models
        self.regions = None if registry is None else Regions(registry)

    async def start(self) -> None:
        """Attaches and warms up every model, then turns ready. LoaderError: one cannot be served."""
        models = self.models.wanted().models
        if self.link is not None:
            await self.link.open(models)
        self.executor = self._executor = self.link or CpuExecutor(self._beside, self.readers)
        self._live = SamplingExecutor(self._executor, self.settings.root, self.settings.owner)
        for name in models:
            self.engines[name] = engine = self._new_engine(name)
            # On a thread, as what an engine process says of states comes over this loop.
            await asyncio.get_running_loop().run_in_executor(None, engine.begin)
        await self._follow()
        self._watch = Watch(self.engines.values, self.settings.poll_s, look=self._look)
        self._watch.start()
        self._beside_requests = [asyncio.create_task(one.run()) for one in (self._scrubber, self._warmer)]
        self._is_open = True

    def _new_engine(self, name: str) -> Engine:
        if self.link is None:
            return Engine.of(
                self.settings,
                name,
                Placer(
                    self.settings,
                    self._backend,
                    count_reads=count_reads,
                    count_remote=count_remote,
                    count_sample=count_sample,
                ),
            )
        return DoorEngine(
            self.link, Model(self.settings.root, name, self.settings.owner), self._backend, self.settings
        )

    def _look(self) -> None:
        """Follows the workers' shared lists, and who asks for live ids, as often as versions."""
        self.executor = self._live.look(self.engines)
        if self.regions is not None:
            self.regions.look()
        is_following = self._following is not None and not self._following.done()
        if self.models.generation != self._taken_generation and not is_following:
            self._following = asyncio.create_task(self._follow())

    @property
    def ready(self) -> bool:
        """Whether clients should send requests here: from `start` to `drain`, while every model answers."""
        has_engine = self.link is None or self.link.is_ready
        if self.settings.max_behind_s and any(
            e.behind_s > self.settings.max_behind_s for e in self.engines.values()
        ):
            return False
        return self._is_open and has_engine and all(engine.is_usable for engine in self.engines.values())

    def drain(self) -> None:
        """Turns readiness off. Requests are still answered."""
        self._is_open = False

    async def stop(self) -> None:
        """Ends the watch and what runs beside it, and waits for lookups that run."""
        self._is_open = False
        if self._watch is not None:
            await self._watch.stop()
            if self._following is not None:
                self._following.cancel()
                await asyncio.gather(self._following, return_exceptions=True)
            for task in self._beside_requests:
                task.cancel()
            await asyncio.gather(*self._beside_requests, return_exceptions=True)
            self._scrubber.stop()
            self._warmer.stop()
        self._beside.shutdown()
        self.readers.close()
        self._executor.close()
        close_hosts()

    def now(self, connections: int = 0, in_flight: int = 0) -> Now:
        """Returns this worker's gauges. connections, in_flight: of its door."""
        waiting, held = self.slots.waiting, self.in_flight.held
        return Now(float(self.ready), in_flight, waiting, connections, held, self.settings.max_connections)

    # ---- models that come and go ----

    async def load_model(self, name: str) -> None:
        """Has every worker serve a published model; waits for all. ApiError: 400 if it cannot be served, 503
        after `ready_timeout_s`."""
        async with self._changing:
            if name not in self.engines:
                # here first: where it fails no other worker hears of it
                self.engines[name] = await self._attached(name)
            serial = self.models.want(name, True)
        await self._until_all(serial, f"model {name!r} is loaded")
        if why := self.models.reasons().get(name):
            self.models.want(name, False)
            raise bad_request(f"model {short(name)} cannot be loaded by every worker: {why}")

    async def unload_model(self, name: str) -> None:
        """Has every worker drop a model; waits for all, and for its requests. ApiError: 404 if it is not
        served, 503 after `ready_timeout_s`."""
        self.engine(name)
        await self._until_all(self.models.want(name, False), f"model {name!r} is unloaded")

    async def _until_all(self, serial: int, what: str) -> None:
        deadline = time.monotonic() + self.settings.ready_timeout_s
        await self._follow()
        while late := self.models.late(serial):
            if time.monotonic() > deadline:
                why = f"{what}, but {len(late)} workers have not followed within "
                why += f"{self.settings.ready_timeout_s} s (ready_timeout_s); see their log"
                raise ApiError(503, ErrorKind.SWAP, why)
            await asyncio.sleep(_LOOK_S)

    async def _attached(self, name: str) -> Engine:
        """The engine of a model, ready to answer. ApiError 400: it cannot be served here."""
        try:
            engine = self._new_engine(name)
            await asyncio.get_running_loop().run_in_executor(None, engine.begin)
        except UNUSABLE as error:
            logger.error("model %s cannot be loaded: %s", short(name), error)
            ERRORS.labels(metrics.UNKNOWN, ErrorKind.SWAP.value).inc()
            what = "the server's log has the reason"  # which may name paths
            if isinstance(error, ModelError):
                what = str(error)
            elif isinstance(error, VersionError):
                what = "no version of it is live on this host; publish one with: tableside load model.toml"
            raise bad_request(f"model {short(name)} cannot be loaded: {what}") from error
        return engine

    async def _follow(self) -> None:
        """Takes and drops models until this worker serves the wanted ones, then says so."""
        while self.models.generation != self._taken_generation:
            async with self._changing:
                self._taken_generation, (wanted, *_) = self.models.read()
                if wanted.serial == self._taken_serial:
                    continue
                reasons = list[tuple[str, str]]()
                for name in [n for n in self.engines if n not in wanted.models]:
                    self.engines.pop(name).close()
                    logger.info("model %s is unloaded", name)
                for name in [n for n in wanted.models if n not in self.engines]:
                    try:
                        self.engines[name] = await self._attached(name)
                    except ApiError as error:
                        reasons.append((name, error.message))
                self._taken_serial = wanted.serial
                self.models.tell(wanted.serial, self.engines, reasons)

    # ---- requests ----

    def engine(self, model: Any) -> Engine:
        """The engine of a model by its name, as a client sent it. ApiError 404: it is not served here."""
        if not isinstance(model, str) or (engine := self.engines.get(model)) is None:
            raise not_found(
                f"model {short(model)} is not served here; this server has: "
                f"{', '.join(self.engines) or 'none'}"
            )
        return engine

    def live(self, model: Any) -> ServedVersion:
        """The live version of a model. ApiError 404: it is not served here."""
        return self.engine(model).served()

    async def version(self, model: Any, version: Any) -> ServedVersion:
        """Returns a version by number, attached if need be; None: the live one. ApiError: 400: no number;
        404: not published, or unusable."""
        engine = self.engine(model)
        if version is None:
            return engine.served()
        number = (
            int(version)
            if isinstance(version, str) and version.isdecimal() and len(version) < 12
            else version
        )
        if type(number) is not int or number < 1:
            raise bad_request(f"version is {short(version)}; expected a number from 1")
        if (found := engine.find(number)) is not None:
            return found
        async with self._attaching:  # requests that name the same version wait for the one that attaches it
            if (found := engine.find(number)) is not None:
                return found
            return await asyncio.get_running_loop().run_in_executor(None, engine.attach_explicit, number)

    def published(self, model: str) -> list[int]:
        """The numbers of a model's published versions."""
        return self.engine(model).model.versions()

    async def beside(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls a slow function on the one thread beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._beside, function, *arguments)
