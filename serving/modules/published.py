"""A model's tables in this process: attached once for all modules, and replaced by new versions between
calls.

    published(source) -> PublishedTables      the one of this process
    PublishedTables.now() -> AttachedVersion  taken once by each call

A thread looks several times a second for a newly live version, prepares it, and swaps it in. A running call
keeps its version. A forked child reads its parent's pages, and starts its own thread with its first call.
"""

import atexit
import json
import logging
import os
import threading
import weakref
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from tableside.loader.versions.states import State, good_state, resolve
from tableside.loader.versions.versions import Model
from tableside.quant import CpuBackend, choose
from tableside.quant.contract import INTERPRETER
from tableside.quant.gpu.residence.registry import is_by_cpu
from tableside.quant.rows.fetched import AskedTable
from tableside.serving.errors import UNUSABLE
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.version import BoundFeature, ServedVersion
from tableside.serving.modules.inputs import ModuleError
from tableside.serving.modules.pending import Missing, PendingCalls
from tableside.serving.settings import ServerSettings

logger = logging.getLogger("tableside")
POLL_S = 0.2
_LONGEST_END_S = 5.0  # for which the end of the process waits, where a version is just being taken


@dataclass(frozen=True)
class ModuleSource:
    """A model's tables in one process; equal sources share one attachment. Exported programs hold it as a
    string. root, owner: None: the settings'. version: None: the live one. device: "cpu", "cuda:N", or
    "interpreter" (tests). placement, hbm_budget, backend, verify: as for `tableside serve`. threads: per CPU
    lookup; None: torch's. ModuleError: a choice is unknown."""

    model: str
    root: str | os.PathLike[str] | None = None
    version: int | None = None
    device: str = "cpu"
    placement: str = "auto"
    hbm_budget: int | None = None
    threads: int | None = None
    backend: str = "native"
    verify: str = "full"
    owner: str | None = None

    def __post_init__(self) -> None:
        if self.root is not None:
            object.__setattr__(self, "root", os.fspath(self.root))
        is_gpu = self.device.removeprefix("cuda:").isdecimal() and self.device.startswith("cuda:")
        if not (self.device in ("cpu", INTERPRETER) or is_gpu):
            raise ModuleError(
                f"device is {self.device!r}; expected 'cpu' or the GPU by its number, as 'cuda:0'"
            )
        is_on_gpu = self.placement != "auto" and not is_by_cpu(self.placement)
        if self.device == "cpu" and (is_on_gpu or self.hbm_budget is not None):
            raise ModuleError("placement and hbm_budget are for GPUs; leave them out, or say device='cuda:0'")
        if self.version is not None and (type(self.version) is not int or self.version < 1):
            raise ModuleError(f"version is {self.version!r}; expected a number from 1, or None")

    def to_string(self) -> str:
        """Returns JSON for `source_of`, without None values."""
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None}, sort_keys=True)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def settings(self) -> ServerSettings:
        """The settings of `tableside serve` with this placement. ModuleError: a setting is wrong."""
        found: dict[str, Any] = {} if self.root is None else {"root": Path(self.root)}
        if self.owner is not None:
            found["owner"] = self.owner
        try:
            return ServerSettings(
                models=(self.model,),
                devices=(self.device.removeprefix("cuda:"),) if self.on_gpu else (),
                workers=1,
                placement=self.placement,
                hbm_budget=self.hbm_budget,
                backend=self.backend,
                verify=self.verify,
                disk_late="error",
                threads=1 if self.threads is None else self.threads,
                **found,
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the settings"
            raise ModuleError(
                f"{where}: {first['msg']} (model {self.model!r} as a PyTorch module)"
            ) from error


@cache
def source_of(text: str) -> ModuleSource:
    try:
        return ModuleSource(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ModuleError(
            f"{text!r} names no tables ({error}); it was made by another release; export the program again"
        ) from error


class AttachedVersion:
    """A version for calls. lookups: prepared by calls. pending: state on a GPU; streams: used by
    calls, by handle. missing: counts of ids without a row."""

    def __init__(self, served: ServedVersion, threads: int, pending: PendingCalls, missing: Missing) -> None:
        self.served, self.threads, self.pending, self.missing = served, threads, pending, missing
        self.version, self.on_gpu = served.version, not isinstance(served.backend, CpuBackend)
        self.lookups: dict[str, Any] = {}
        self.streams: dict[int | None, Any] = {}

    def __del__(self) -> None:
        self.pending.retire([*self.streams.values()], self.served)


class PublishedTables:
    """The tables of a source in this process. Any thread may call. LoaderError, QuantError, ServingError,
    OSError: the version cannot be read."""

    def __init__(self, source: ModuleSource) -> None:
        self.source = source
        self.follows = source.version is None
        self.pending, self.missing = PendingCalls(), Missing()
        self._required: dict[str, tuple[int, str]] = {}
        self._numbered: set[str] = set()
        self._settings = source.settings()
        self._attaching = threading.RLock()
        self._engine = self._new_engine()
        self._current: AttachedVersion | None = None
        self._refusal: str | None = None
        model = self._engine.model
        self._take(good_state(model) if source.version is None else resolve(model, source.version))

    def _new_engine(self) -> Engine:
        s = self._settings
        placer = Placer(s, choose(s.backend), on_disk=False)
        placer.open()
        model = Model(s.root, self.source.model, s.owner)
        return Engine(model, s.model_copy(update={"threads": self.threads}), placer, scores=False)

    @property
    def threads(self) -> int:
        return torch.get_num_threads() if self.source.threads is None else self.source.threads

    def now(self) -> AttachedVersion:
        """The version of a call that begins now. ModuleError: this process cannot read it."""
        current = self._current
        if current is None:
            raise ModuleError(self._refusal or f"model {self.source.model!r} is not attached")
        if self.follows and not watch.is_running:
            watch.start()
        return current

    def require(self, features: dict[str, BoundFeature]) -> None:
        """Notes features, dims and poolings that modules need; later versions must have them."""
        for name, bound in features.items():
            self._required[name] = (bound.table.dim, bound.pooling.label)

    def require_numbers(self, feature: str) -> None:
        """Notes a feature whose ids are row numbers, in later versions as well. ModuleError: they are not."""
        self._check_numbers(self.now().served, feature)
        self._numbered.add(feature)

    @staticmethod
    def _check_numbers(served: ServedVersion, feature: str) -> None:
        table = served.features[feature].table
        are_numbers = table.row_map is None or table.row_map.is_plain
        if isinstance(table, AskedTable):
            are_numbers = not table.owners.buckets and table.default is None
        if not are_numbers:
            raise ModuleError(
                f"feature {feature!r} of model {served.header.model!r} version {served.version} has raw ids, "
                "a first id, or a row for missing ones; heads need ids that are row numbers"
            )

    def look(self) -> bool:
        """Takes the live version; returns whether it changed. Logs a failure and keeps the present one."""
        if not self.follows:
            return False
        with self._attaching:
            if self._engine.shall_hold():
                self._engine.hold()
            state = self._engine.changed()
            # its object would outlive the sweep
            before = 0 if self._current is None else self._current.version
            if state is None:
                return False
            try:
                self._take(state, as_successor=True)
            except UNUSABLE as error:
                if not self._engine.is_passing(state, error) and self._engine.refuse(state):
                    logger.error(
                        "version %s of %s is not taken by modules: %s", state, self.source.model, error
                    )
                return False
        self.pending.sweep()
        is_new = before != state.version
        level = logging.INFO if is_new else logging.DEBUG
        logger.log(level, "modules read %s version %s from now on", self.source.model, state)
        return True

    def _take(self, state: State, as_successor: bool = False) -> None:
        served = self._engine.attach(self._engine.agreed(state), as_successor=as_successor)
        self._check(served)
        self._engine.swap(served)
        self._current = AttachedVersion(served, self.threads, self.pending, self.missing)

    def _check(self, served: ServedVersion) -> None:
        for name, (dim, pooling) in self._required.items():
            bound = served.features.get(name)
            found = None if bound is None else (bound.table.dim, bound.pooling.label)
            if found != (dim, pooling):
                raise ModuleError(
                    f"feature {name!r} has dim {dim} and pooling {pooling} in the modules of this process; "
                    f"version {served.version} has "
                    f"{'no such feature' if found is None else f'dim {found[0]} and pooling {found[1]}'}; "
                    "make a module for it, or publish the model with this feature"
                )
        for name in self._numbered:
            self._check_numbers(served, name)

    def __copy__(self) -> "PublishedTables":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "PublishedTables":
        return self

    def __reduce__(self) -> "tuple[Any, tuple[ModuleSource]]":
        return published, (self.source,)

    def after_fork(self) -> None:
        """Resets locks, engine and counts in a child; a GPU's tables are out of reach."""
        self._attaching, self.missing, self.pending = threading.RLock(), Missing(), PendingCalls()
        if self.source.on_gpu and self.source.device != "interpreter":
            self._current, self.follows = None, False
            self._refusal = (
                f"model {self.source.model!r} is on {self.source.device}, which a forked process cannot use; "
                "start workers with spawn, or give them a module with device='cpu'"
            )
        elif self._current is not None:
            self._engine = self._new_engine()
            self._engine.swap(self._current.served)
            self._current = AttachedVersion(self._current.served, self.threads, self.pending, self.missing)


class ModuleWatch:
    """The thread of this process that looks for new versions, from the first call on."""

    def __init__(self) -> None:
        self.is_running = False
        self._starting, self._ending = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread if it is not running."""
        with self._starting:
            if not self.is_running:
                self.is_running = True
                self._thread = threading.Thread(target=self._run, name="tableside-versions", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Ends the thread before the process ends: inside torch it would raise SIGABRT."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_LONGEST_END_S)

    def _run(self) -> None:
        while not self._ending.wait(POLL_S):
            for one in _known():
                try:
                    one.pending.sweep()
                    one.look()
                except Exception:
                    logger.exception("the versions of %s cannot be looked at", one.source.model)
            one = None  # type: ignore[assignment]  # who is let go meanwhile goes now

    def after_fork(self) -> None:
        self.is_running, self._thread = False, None
        self._starting, self._ending = threading.Lock(), threading.Event()


watch = ModuleWatch()
atexit.register(lambda: watch.end())
_all: "weakref.WeakValueDictionary[ModuleSource, PublishedTables]" = weakref.WeakValueDictionary()
_held: dict[str, PublishedTables] = {}  # by operators of programs that have no module
_opening = threading.Lock()


def published(source: ModuleSource) -> PublishedTables:
    """Returns this process's attachment, which lasts as long as its modules. Raises as `PublishedTables`."""
    with _opening:
        if (found := _all.get(source)) is None:
            found = _all[source] = PublishedTables(source)
        return found


def published_by_string(text: str) -> PublishedTables:
    """As `published`, for an operator: without a module the process keeps it (`release`)."""
    source = source_of(text)
    if (found := _all.get(source)) is None:
        found = _held[text] = published(source)
    return found


def release() -> int:
    """Drops tables attached by programs without a module; returns how many. The next call attaches again."""
    count = len(_held)
    _held.clear()
    return count


def _known() -> list[PublishedTables]:
    with _opening:
        return list(_all.values())


def _after_fork() -> None:
    global _opening
    _opening = threading.Lock()
    watch.after_fork()
    for one in _known():
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)
