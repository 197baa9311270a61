"""A model as the modules of this process read it: attached once for all of them, and followed to new versions
between calls.

    published(source) -> PublishedTables      the one of this process
    PublishedTables.now() -> AttachedVersion the version of a call; a call takes it once

One thread of the process looks several times a second for a version that was made live, attaches, places and
warms it up, and then puts it in the place of the other one. A call that runs meanwhile keeps what it took,
and the last one frees it.

After a fork a child reads the pages that its parent mapped. It starts a thread of its own with its first
call.
"""

import atexit
import logging
import os
import threading
import weakref
from typing import Any

import torch

from tableside.loader.errors import LoaderError
from tableside.loader.versions.states import State, good_state, resolve
from tableside.loader.versions.versions import Model
from tableside.quant import CpuBackend, QuantError, choose
from tableside.serving.errors import ServingError
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.version import BoundFeature, ServedVersion
from tableside.serving.modules.errors import ModuleError
from tableside.serving.modules.missing import Missing
from tableside.serving.modules.pending import Pending
from tableside.serving.modules.source import ModuleSource

logger = logging.getLogger("tableside")

POLL_S = 0.2
_LONGEST_END_S = 5.0  # for which the end of the process waits, where a version is just being taken


class AttachedVersion:
    """One version as calls take it. lookups, keyed: what was prepared for it, by calls. pending: what
    calls on a GPU leave behind; streams: those that they were on, by handle. missing: counts of ids
    without a row."""

    def __init__(self, served: ServedVersion, threads: int, pending: Pending, missing: Missing) -> None:
        self.served, self.threads, self.pending, self.missing = served, threads, pending, missing
        self.version, self.on_gpu = served.version, not isinstance(served.backend, CpuBackend)
        self.lookups: dict[str, Any] = {}
        self.keyed: dict[str, Any] = {}
        self.streams: dict[int | None, Any] = {}

    def __del__(self) -> None:
        self.pending.retire([*self.streams.values()], self.served)


class PublishedTables:
    """The tables of a source in this process. Any thread may call.

    LoaderError, QuantError, ServingError, OSError: the version cannot be read here.
    """

    def __init__(self, source: ModuleSource) -> None:
        self.source = source
        self.follows = source.version is None
        self.pending, self.missing = Pending(), Missing()
        self._required: dict[str, tuple[int, str]] = {}
        self._settings = source.settings()
        self._attaching = threading.RLock()
        self._engine = self._new_engine()
        self._current: AttachedVersion | None = None
        self._refusal: str | None = None
        model = self._engine.model
        self._take(good_state(model) if source.version is None else resolve(model, source.version))

    def _new_engine(self) -> Engine:
        s = self._settings
        placer = Placer(s, choose(s.backend))
        placer.open()
        model = Model(s.root, self.source.model, s.owner)
        return Engine(model, s.model_copy(update={"threads": self.threads}), placer, scores=False)

    @property
    def threads(self) -> int:
        """Threads of one lookup on the CPU."""
        return torch.get_num_threads() if self.source.threads is None else self.source.threads

    def now(self) -> AttachedVersion:
        """The version of a call that begins now. ModuleError: this process cannot read it."""
        current = self._current
        if current is None:
            raise ModuleError(self._refusal or f"model {self.source.model!r} is not attached")
        if self.follows and not watch.is_running:
            watch.start()
        return current

    @property
    def version(self) -> int:
        """The version that calls are answered from."""
        return self.now().version

    def require(self, features: dict[str, BoundFeature]) -> None:
        """Notes what modules rely on: a later version without these features, dims and poolings is not
        taken."""
        for name, bound in features.items():
            self._required[name] = (bound.table.dim, bound.pooling.label)

    def look(self) -> bool:
        """Takes the version that is live now, where it is another one; whether it was taken. Where it
        cannot be read the present one stays, and the log says why."""
        if not self.follows:
            return False
        with self._attaching:
            state = self._engine.changed()
            before = (
                0 if self._current is None else self._current.version
            )  # its object would outlive the sweep
            if state is None:
                return False
            try:
                self._take(state, as_successor=True)
            except (LoaderError, QuantError, ServingError, OSError) as error:
                if self._engine.refuse(state):
                    logger.error(
                        "version %s of %s is not taken by modules: %s", state, self.source.model, error
                    )
                return False
        self.pending.sweep()
        is_new = before != state.version
        logger.log(
            logging.INFO if is_new else logging.DEBUG,
            "modules read %s version %s from now on",
            self.source.model,
            state,
        )
        return True

    def _take(self, state: State, as_successor: bool = False) -> None:
        served = self._engine.attach(state, as_successor=as_successor)
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
                    "version "
                    f"{served.version} has "
                    f"{'no such feature' if found is None else f'dim {found[0]} and pooling {found[1]}'}; "
                    "make a module for it, or publish the model with this feature"
                )

    def __copy__(self) -> "PublishedTables":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "PublishedTables":
        return self

    def __reduce__(self) -> "tuple[Any, tuple[ModuleSource]]":
        return published, (self.source,)

    def after_fork(self) -> None:
        """In a child: locks and the engine are those of no other thread, counts begin at 0; tables of a
        GPU are out of reach."""
        self._attaching, self.missing, self.pending = threading.RLock(), Missing(), Pending()
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
        """Starts the thread where it does not run yet."""
        with self._starting:
            if not self.is_running:
                self.is_running = True
                self._thread = threading.Thread(target=self._run, name="tableside-versions", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Ends the thread, for the end of the process: one that is in torch's code then would end it with
        SIGABRT."""
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
    """The attachment of this process; it goes with the last module that uses it. Raises as
    `PublishedTables`."""
    with _opening:
        if (found := _all.get(source)) is None:
            found = _all[source] = PublishedTables(source)
        return found


def published_by_string(text: str) -> PublishedTables:
    """As `published`, for an operator: where no module uses the source, this process keeps it from now on
    (`release`)."""
    source = ModuleSource.from_string(text)
    if (found := _all.get(source)) is None:
        found = _held[text] = published(source)
    return found


def release() -> int:
    """Lets go of the tables that programs without a module attached; returns how many. The next call
    attaches them again."""
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
