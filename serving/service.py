"""What one worker answers from: its engines, its executor, and whether it is ready."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tableside.loader.versions import Model
from tableside.quant import CpuBackend, choose
from tableside.serving.admission import CPU_SLOTS, Bytes, Slices, Slots
from tableside.serving.engine import Engine
from tableside.serving.engine_process.link import EngineLink
from tableside.serving.engine_process.versions import DoorEngine
from tableside.serving.errors import bad_request, not_found, short
from tableside.serving.executors import CpuExecutor, Executor
from tableside.serving.placement import Placer
from tableside.serving.region_registry import RegionRegistry
from tableside.serving.regions import RegionLimits, Regions
from tableside.serving.scorer import ScorerLimits
from tableside.serving.scrub import Scrubber
from tableside.serving.settings import ServerSettings
from tableside.serving.version import ServedVersion
from tableside.serving.watch import Watch

logger = logging.getLogger("tableside")

_Result = TypeVar("_Result")


def _nothing() -> None:
    pass


def _engine(model: Model, backend: CpuBackend, settings: ServerSettings, link: EngineLink | None) -> Engine:
    """The versions of one model, as this worker looks them up itself, or has its engine process do so."""
    if link is not None:
        return DoorEngine(link, model, backend, settings)
    return Engine(
        model,
        backend,
        Placer(settings, backend),
        threads=settings.threads,
        verify=settings.verify,
        max_response_bytes=settings.max_response_bytes,
        scorer_limits=ScorerLimits(
            settings.max_scorer_bytes, settings.scorer_timeout_s, settings.drain_s + settings.shutdown_timeout_s
        ),
    )


class Service:
    """A worker's engines by model name, what runs their requests (`executor`), and what it takes on (`slots`, `in_flight`).

    Belongs to one event loop. executor: there from `start` on. regions: of shared memory that clients registered; None: not
    allowed.
    """

    executor: Executor
    regions: Regions | None = None

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.link = EngineLink(settings) if settings.devices else None
        backend = choose(settings.backend)
        self.engines = {
            name: _engine(Model(settings.root, name, settings.owner), backend, settings, self.link) for name in settings.models
        }
        self._scrubber = Scrubber(self.engines.values(), settings.scrub_hours * 3600)
        self._is_open = False
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="tableside-beside")
        slots = CPU_SLOTS if not settings.devices else max(CPU_SLOTS, 4 * settings.max_batch)
        self.slices = Slices()
        self.slots = Slots(slots, settings.max_waiting, settings.max_wait_s)
        self.in_flight = Bytes(settings.max_in_flight_bytes)
        self._watch: Watch | None = None
        self._attaching = asyncio.Lock()

    def share_regions(self, registry: RegionRegistry) -> None:
        """Allows the regions of a registry that all workers share."""
        s = self.settings
        limits = RegionLimits(s.max_client_shm_regions, s.max_client_shm_bytes)
        self.regions = Regions(registry, limits, until_disconnected=s.client_shm_until == "disconnected")

    async def start(self) -> None:
        """Attaches and warms up every model, then turns ready. LoaderError: one of them cannot be served here."""
        if self.settings.allow_client_shm and self.regions is None:
            self.share_regions(RegionRegistry())  # this worker is the only one
        if self.link is not None:
            await self.link.open()
        self.executor = self.link or CpuExecutor(self._beside, self.settings.inline_rows)
        for engine in self.engines.values():
            engine.swap(engine.attach(engine.model.good() if self.link is None else None))
            served = engine.served()
            logger.info(
                "serving %s version %d: %d tables, %.1f MB, lookups on %s",
                engine.model.name,
                served.version,
                len(served.header.tables),
                served.segment.size / 1e6,
                served.backend.description,
            )
        look = self.regions.look if self.regions is not None else _nothing
        self._watch = Watch(self.engines.values, self.settings.poll_s, is_lost=self.executor.end_if_lost, look=look)
        self._watch.start()
        self._scrubbing = asyncio.create_task(self._scrubber.run())
        self._is_open = True

    @property
    def ready(self) -> bool:
        """Whether clients should send requests here: from `start` to `drain`, while every model answers."""
        has_engine = self.link is None or self.link.is_ready
        return self._is_open and has_engine and all(engine.is_usable for engine in self.engines.values())

    def drain(self) -> None:
        """Turns readiness off. Requests are still answered."""
        self._is_open = False

    async def stop(self) -> None:
        """Ends the watch and the scrubber, and waits for lookups that run."""
        self._is_open = False
        if self._watch is not None:
            await self._watch.stop()
            self._scrubbing.cancel()
            await asyncio.gather(self._scrubbing, return_exceptions=True)
            self._scrubber.stop()
        self._beside.shutdown()
        self.executor.close()

    # ---- requests ----

    def engine(self, model: Any) -> Engine:
        """The engine of a model by its name, as a client sent it. ApiError 404: it is not served here."""
        if not isinstance(model, str) or (engine := self.engines.get(model)) is None:
            raise not_found(f"model {short(model)} is not served here; this server has: {', '.join(self.engines)}")
        return engine

    def live(self, model: Any) -> ServedVersion:
        """The live version of a model. ApiError 404: it is not served here."""
        return self.engine(model).served()

    async def version(self, model: Any, version: Any) -> ServedVersion:
        """A version by its number, a string of digits or an int. It is attached where it is not yet.

        ApiError: 400 where that is no number, 404 where the version is not published or cannot be served.
        """
        engine = self.engine(model)
        number = int(version) if isinstance(version, str) and version.isdecimal() and len(version) < 12 else version
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
        """Calls a function on the one thread beside the event loop, for work that would keep the loop for too long."""
        return await asyncio.get_running_loop().run_in_executor(self._beside, function, *arguments)
