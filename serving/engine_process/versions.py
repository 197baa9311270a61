"""A door's versions: those of its engine process, laid out over segments that the door has mapped. A door
reads rows only for requests too small for the device (`gpu_from_ids`), and none of a disk."""

import contextlib
from typing import Any

from tableside.loader.errors import LoaderError
from tableside.loader.segment.header import StoredScorer
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State, attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import Backend, CpuBackend, Planner, Precision, QuantError
from tableside.quant.gpu.residence.registry import read_from_disk
from tableside.serving.cluster.owners import described_sources
from tableside.serving.engine_process.described import DescribingPlanner, model_key
from tableside.serving.engine_process.link import EngineLink
from tableside.serving.errors import ApiError, ErrorKind, ServingError
from tableside.serving.model.engine import CacheState, Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.placements import Placements
from tableside.serving.model.scorer import Scorer
from tableside.serving.model.version import Beside, ServedVersion
from tableside.serving.settings import ServerSettings


class _EngineBackend(Backend):
    """Stands for the engine process's backend. name: its description."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise QuantError("an engine process plans and looks up; use the version's requests")

    lookup = plan = planner = _refuse


class _EngineScorer(Scorer):
    """Stands for the engine process's scorer."""

    def __init__(self, segment: Segment, stored: StoredScorer, told: dict[str, Any]) -> None:
        self.model, self.version = segment.header.model, segment.header.version
        self.kind, self.inputs = stored.kind, stored.inputs
        self.width, self.runs_on = told["width"], told["runs_on"]
        self.precision = Precision[told["dtype"].upper()]


def _not_here(*_: object) -> None:
    raise ServingError("rows of other hosts are asked for by the engine process, not by a door")


class EngineVersion(ServedVersion):
    def _device_planner(self) -> Planner:
        return DescribingPlanner(model_key(self.header.model), self.state.number, self.layout)


class DoorEngine(Engine):
    """A model's versions as the engine process serves them."""

    def __init__(self, link: EngineLink, model: Model, backend: CpuBackend, settings: ServerSettings) -> None:
        super().__init__(model, settings, Placer(settings, backend))
        self._link = link
        self._beside = Beside(backend, settings.gpu_from_ids) if settings.gpu_from_ids else None

    @property
    def cache(self) -> CacheState | None:
        """The engine process's cache, up to a second ago."""
        return self._link.cache

    def _first(self) -> State:
        live = self._link.live.get(self.model.name) or self._link.attach(self.model.name, 0)
        return State.numbered(live["state"])

    def attach(self, state: State | None = None, *, as_successor: bool = False) -> ServedVersion:
        """Maps a state that the engine has attached (None: its live one). ApiError, LoaderError: it is not
        there."""
        number = (self._first() if state is None else state).number
        told = self._link.described.get((self.model.name, number)) or self._link.attach(
            self.model.name, number
        )
        before = self._served
        placed = told["placements"]
        # the engine process reads every row
        segment = attach_state(
            self.model, State.numbered(number), "header", None if before is None else before.segment
        )
        stored, remote = segment.header.scorer, described_sources(segment, self._settings, _not_here)
        return EngineVersion(
            segment,
            _EngineBackend(told["backend"]),
            Placements(
                placed,
                on_host={**segment.tables, **remote},
                hbm_bytes=told["hbm_bytes"],
                is_counted=told["is_counted"],
            ),
            scorer=None if stored is None else _EngineScorer(segment, stored, told["scorer"]),
            threads=self._settings.threads,
            max_response_bytes=self._settings.max_response_bytes,
            verified_at=told["verified_at"],
            beside=None if remote or read_from_disk(placed) else self._beside,
            names=before.names if before is not None and segment.base is before.segment.base else None,
        )

    def agreed(self, wanted: State, lacks_none: bool = False) -> State:
        """The engine process has agreed with the owners of remote tables."""
        return wanted

    def shall_hold(self) -> bool:
        return False

    def is_passing(self, state: State, error: Exception) -> bool:
        """Like any engine. An engine process may not know its predecessor's states."""
        told = self._link.live.get(self.model.name)
        return super().is_passing(state, error) or (told is not None and told["state"] != state.number)

    def swap(self, served: ServedVersion) -> None:
        super().swap(served)
        self._link.moved(self.model.name, served.state.number)

    def close(self) -> None:
        self._link.leave(self.model.name)

    def changed(self) -> State | None:
        live = self._link.live[self.model.name]
        unusable = live["unusable"]
        self._unusable = ApiError(503, ErrorKind.DAMAGED, unusable) if unusable else None
        with contextlib.suppress(LoaderError, OSError):  # the engine process says what is wrong with it
            self._live = state_of(self.model.record())
        self._note(self._live)
        served = self._served.state if self._served is not None else State(0)
        told = State.numbered(live["state"])
        return told if told != served and told not in self._refused else None
