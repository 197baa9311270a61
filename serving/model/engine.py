"""The engine of one model: which of its versions is live, and which others are attached.

A request takes `engine.served()` once and answers from it, so it never mixes versions. The engine swaps the
live version whole. A replaced version stays mapped until its last request is done, and then goes.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from tableside.loader.errors import LoaderError, VersionError
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State, attach_state, good_state, resolve, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import QuantError
from tableside.serving.errors import ApiError, ErrorKind, ServingError, not_found
from tableside.serving.model.placement import Placements, Placer
from tableside.serving.model.scorer import NO_LIMITS, ScorerLimits
from tableside.serving.model.scorers import open_scorer
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings

logger = logging.getLogger("tableside")

_VERIFIERS = (
    4  # threads that read a version's rows while it is placed on a GPU, where no version is served beside it
)
_BEGIN_S, _AGAIN_S = (
    30.0,
    0.05,
)  # for which states may go while the first one is attached; between two of them
_EXPLICIT_VERSIONS = 4  # versions beside the live one that stay attached after a request named them


class _Clock:
    """Where time goes: seconds of each of several steps, for the log."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._steps: list[str] = []

    def mark(self, step: str) -> None:
        """What was done since the last mark, or since this was made."""
        now = time.monotonic()
        self._steps.append(f"{step} {now - self._last:.2f}")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._started:.2f} s ({', '.join(self._steps)})"


class CacheState(NamedTuple):
    """A GPU's cache at some time."""

    device: str
    slots: int
    occupied_slots: int
    bytes: int


class Engine:
    """The versions of one model that this process answers from."""

    def __init__(
        self,
        model: Model,
        settings: ServerSettings,
        placer: Placer,
        *,
        scorer_limits: ScorerLimits = NO_LIMITS,
        scores: bool = True,
    ) -> None:
        """scores: open the versions' scorers."""
        self.model, self._settings, self._placer = model, settings, placer
        self._scorer_limits, self._scores = scorer_limits, scores
        self._served: ServedVersion | None = None
        self._explicit: OrderedDict[int, ServedVersion] = OrderedDict()
        self._refused: set[State] = set()  # since `_live` was made live
        self._live, self._behind_since = State(0), 0.0
        self._unusable: ApiError | None = None
        self._last_warning = ""

    @classmethod
    def of(cls, settings: ServerSettings, name: str, placer: Placer) -> "Engine":
        """The engine of a model that this server looks up itself."""
        limits = ScorerLimits(
            settings.max_scorer_bytes,
            settings.scorer_timeout_s,
            settings.drain_s + settings.shutdown_timeout_s,
        )
        return cls(Model(settings.root, name, settings.owner), settings, placer, scorer_limits=limits)

    def begin(self) -> None:
        """Attaches the state to serve first, and answers from it. Where that goes meanwhile, as newer ones
        come, it is the next.

        Errors: as of `attach`, VersionError where none is live.
        """
        deadline = time.monotonic() + _BEGIN_S
        while True:
            state = self._first()
            try:
                self.swap(self.attach(state))
                break
            except (LoaderError, ServingError) as error:
                if time.monotonic() > deadline or not self.is_passing(state, error):
                    raise
            time.sleep(_AGAIN_S)
        served = self.served()
        logger.info(
            "serving %s version %s: %d tables, %.1f MB, lookups on %s",
            self.model.name,
            served.state,
            len(served.header.tables),
            served.segment.size / 1e6,
            served.backend.description,
        )

    def _first(self) -> State:
        return good_state(self.model)

    @property
    def cache(self) -> CacheState | None:
        """The cache that all models share on the GPU, where there is one."""
        if (cache := self._placer.cache) is None:
            return None
        held = cache.statistics()
        return CacheState(str(cache.device), held.slots, held.occupied, cache.bytes)

    def served(self) -> ServedVersion:
        """The version that answers. ApiError: none is attached yet, or its rows were found damaged and
        there is no other."""
        if self._unusable is not None:
            raise self._unusable
        return self.attached()

    def attached(self) -> ServedVersion:
        """The version that is attached, whether or not it may answer. ApiError: none is yet."""
        if self._served is None:
            raise not_found(f"model {self.model.name!r} is not ready")
        return self._served

    @property
    def is_usable(self) -> bool:
        """Whether requests are answered; False where the served rows were found damaged and there is no
        other version."""
        return self._unusable is None

    @property
    def unusable_because(self) -> str:
        """Why requests are not answered; "" where they are."""
        return "" if self._unusable is None else self._unusable.message

    def attach(self, state: State | None = None, *, as_successor: bool = False) -> ServedVersion:
        """Maps, verifies, places and warms up a state (None: the live one). It does not change which one is
        served.

        as_successor: the state may take the room of the one that is served, which goes when its last request
        is done, and its rows in a cache, where they did not change. It is to be swapped in at once.
        LoaderError, QuantError, ServingError, OSError: the state cannot be served here.
        """
        before = self._served
        like = None if before is None else before.segment
        unverified: Segment | None = None
        if self._placer.gpu is not None and self._settings.verify == "full":
            version = (state or state_of(self.model.record())).version
            if like is None or like.header.version != version:
                unverified = like = self.model.attach(version or None, "header")
        segment = attach_state(self.model, state, self._settings.verify, like)
        if before is not None and segment.base is before.segment.base:
            return before.with_deltas(
                segment, self._placer.place(segment, before.placed if as_successor else None)
            )
        replaced = before.placed if before is not None and as_successor else None
        if unverified is None or segment.base is not unverified:
            return self._attach(segment, replaced)
        unverified.verify_indexes()
        with ThreadPoolExecutor(
            1, "tableside-verify"
        ) as beside:  # rows, while they are copied and kernels are loaded
            verifying = beside.submit(unverified.verify, 1 if as_successor else _VERIFIERS)
            served = self._attach(segment, replaced, verifying.result)
        return served

    def _attach(
        self, segment: Segment, replaced: Placements | None, verified: Callable[[], None] = lambda: None
    ) -> ServedVersion:
        """The rest of `attach`. replaced: what its successor takes the room of. verified: waits until
        every row was read."""
        clock = _Clock()
        try:
            placed = self._placer.place(segment, replaced)
            clock.mark("placed")
            scorer = None
            if self._scores:
                scorer = open_scorer(
                    segment,
                    self._placer.torch_device,
                    self._settings.threads,
                    self._scorer_limits,
                    on_device=self._placer.gpu is not None,
                    precision=self._settings.scorer_precision,
                )
            clock.mark("scorer")
            self._placer.compile(segment)
            clock.mark("kernels")
            served = ServedVersion(
                segment,
                self._placer.gpu or self._placer.cpu,
                placed,
                scorer=scorer,
                threads=self._settings.threads,
                max_response_bytes=self._settings.max_response_bytes,
                verified_at=time.time() if self._settings.verify == "full" else 0.0,
            )
            served.warm_up()
            if self._placer.gpu is not None and served.scorer is not None and served.scorer.calls is not None:
                self._placer.gpu.launcher.warm_up_follower(
                    partial(served.scorer.calls.warm_up, served.scorer.admit)
                )
            clock.mark("warm-up")
            verified()
            clock.mark("rest of verifying")
            served.placed.take_over()
        except (LoaderError, QuantError, ServingError, OSError):
            raise
        except Exception as error:  # whatever a GPU, its compiler or a scorer may raise
            logger.exception("version %d of %s cannot be served", segment.header.version, self.model.name)
            raise ServingError(
                f"{self.model.name} version {segment.header.version} cannot be served: {error!r}"
            ) from error
        if self._placer.gpu is not None:
            logger.info("%s version %s was attached in %s", self.model.name, served.state, clock)
        return served

    def swap(self, served: ServedVersion) -> None:
        """Answers from `served`, from the next request on."""
        self._served, self._unusable = served, None
        self._note(self._live)

    def close(self) -> None:
        """The model is served no more."""

    def changed(self) -> State | None:
        """The state that should be served instead of the present one, or None.

        That is the live one, unless it is served already or was refused before. Where rows of the served
        version were found damaged it is the last good version.
        """
        try:
            current, damaged = state_of(self.model.record()), self.model.damaged_versions()
            good = [resolve(self.model, v) for v in self.model.last_good()] if damaged else []
        except (LoaderError, OSError) as error:
            self._warn(f"cannot see which version of {self.model.name} is live: {error}")
            return None
        if current != self._live:
            self._live = current
            self._refused.clear()
        self._note(current)
        served = self._served.state if self._served is not None else State(0)
        is_damaged = served.version in damaged
        wanted = (
            [current] if current.version and current.version not in damaged else good if is_damaged else []
        )
        wanted = [state for state in wanted if state not in self._refused]
        if is_damaged and not wanted and self._unusable is None:
            self._give_up(served.version)
        return wanted[0] if wanted and wanted[0] != served else None

    def _note(self, live: State) -> None:
        """Notes since when the live state has been another one than the one that answers."""
        is_behind = self._served is not None and live.version and live != self._served.state
        self._behind_since = (self._behind_since or time.monotonic()) if is_behind else 0.0

    @property
    def behind_s(self) -> float:
        """For how many seconds the live state has been another one than the one that answers; 0: it is
        that one."""
        return time.monotonic() - self._behind_since if self._behind_since else 0.0

    def refuse(self, state: State) -> bool:
        """Remembers that `state` cannot be served, until another one is made live. Whether that is new."""
        is_new = state not in self._refused
        self._refused.add(state)
        return is_new

    def is_passing(self, state: State, error: Exception) -> bool:
        """Whether what kept `state` from being attached passes: a newer state is live and this one's files
        went, or an engine process is being replaced. LoaderError, OSError: nobody can see which state is
        live."""
        if isinstance(error, VersionError):
            return state_of(self.model.record()) != state
        return isinstance(error, ApiError) and error.status == 503

    def _give_up(self, version: int) -> None:
        logger.critical(
            "rows of %s version %d are damaged, and no other version can be served", self.model.name, version
        )
        self._unusable = ApiError(
            503,
            ErrorKind.DAMAGED,
            f"rows of {self.model.name} were found damaged, and there is no other version; load it again",
        )

    def _warn(self, line: str) -> None:
        """Logs a line once, not at each look."""
        if line != self._last_warning:
            logger.warning("%s", line)
        self._last_warning = line

    def find(self, version: int) -> ServedVersion | None:
        """An attached version by number, or None."""
        if self._served is not None and self._served.version == version:
            return self._served
        return self._explicit.get(version)

    def find_state(self, state: State) -> ServedVersion | None:
        """An attached state, or None."""
        if self._served is not None and self._served.state == state:
            return self._served
        found = self._explicit.get(state.version)
        return found if found is not None and found.state == state else None

    def forget_removed(self) -> None:
        """Lets go of versions that requests named and that were removed or found damaged since."""
        if not self._explicit:
            return
        good = set(self.model.versions()) - set(self.model.damaged_versions())
        for version in list(self._explicit):  # a copy: a thread may attach one meanwhile
            if version not in good:
                self._explicit.pop(version, None)

    def attach_explicit(self, version: int, state: State | None = None) -> ServedVersion:
        """Attaches a version that a request named, in a state of it; None: its newest. One call at a time.

        ApiError 404: the version is not published, or cannot be served. The log has the reason; a client
        learns no paths.
        """
        while True:
            published = self.model.versions()
            if version not in published:
                known = ", ".join(map(str, published)) or "none"
                raise not_found(
                    f"version {version} of model {self.model.name!r} is not published; versions there: "
                    f"{known}"
                )
            wanted = state or resolve(self.model, version)
            try:
                served = self.attach(wanted)
                break
            except (LoaderError, QuantError, ServingError, OSError) as error:
                is_gone = isinstance(error, (VersionError, ApiError))
                if (
                    is_gone and (newest := resolve(self.model, version)) != wanted
                ):  # changes came, and this state went
                    state = newest
                    continue
                logger.error(
                    "version %d of %s, which a request named, is not taken: %s",
                    version,
                    self.model.name,
                    error,
                )
                what = f"version {version} of model {self.model.name!r} cannot be served; the server's log has the reason"
                raise not_found(what) from error
        self._explicit[version] = served
        if len(self._explicit) > _EXPLICIT_VERSIONS:
            self._explicit.popitem(last=False)
        return served
