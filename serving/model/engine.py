"""The engine of one model: its live version and others attached. A request takes `engine.served()` once, so
it never mixes versions. A replaced version stays mapped until its last request is done."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from tableside.loader.errors import LoaderError, VersionError
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State, attach_state, good_state, resolve, state_of
from tableside.loader.versions.versions import Model
from tableside.serving.cluster.agreed import Agreement, NotAgreed
from tableside.serving.errors import UNUSABLE, ApiError, ErrorKind, ServingError, not_found
from tableside.serving.model.placement import Placer
from tableside.serving.model.placements import Placements
from tableside.serving.model.scorer import NO_LIMITS, ScorerLimits
from tableside.serving.model.scorers import open_scorer
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings

logger = logging.getLogger("tableside")

# threads that read a version's rows while it is placed on a GPU, where no version is served beside it
_VERIFIERS = 4
_REST = 3.0  # seconds of rest for each second of reading, beside requests
# for which states may go while the first one is attached; between two of them
_BEGIN_S, _AGAIN_S = 30.0, 0.05
_OWNERS_S = 10.0  # for which a start waits for owners that are not reached
_NAMED_S = 10.0  # that a named version stays attached whose owners may drop its state
_EXPLICIT_VERSIONS = 4  # versions beside the live one that stay attached after a request named them


class _Named(NamedTuple):
    """A version that a request named. at: of time.monotonic, when it was attached."""

    served: ServedVersion
    at: float


class CacheState(NamedTuple):
    device: str
    slots: int
    occupied_slots: int
    bytes: int


class Steps:
    """Seconds of several steps, for the log."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._steps: list[str] = []

    def mark(self, step: str) -> None:
        now = time.monotonic()
        self._steps.append(f"{step} {now - self._last:.2f}")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._started:.2f} s ({', '.join(self._steps)})"


class Engine:
    """A model's versions in this process."""

    def __init__(
        self,
        model: Model,
        settings: ServerSettings,
        placer: Placer,
        *,
        scorer_limits: ScorerLimits = NO_LIMITS,
        scores: bool = True,
    ) -> None:
        self.model, self._settings, self._placer = model, settings, placer
        self._scorer_limits, self._scores = scorer_limits, scores
        self._served: ServedVersion | None = None
        self._explicit: OrderedDict[int, _Named] = OrderedDict()
        self._refused: set[State] = set()  # since `_live` was made live
        self._live, self._behind_since = State(0), 0.0
        self._unusable: ApiError | None = None
        self._last_warning = ""
        self._agreement = Agreement(model, settings)

    @classmethod
    def of(cls, settings: ServerSettings, name: str, placer: Placer) -> "Engine":
        """Makes the engine of a model that this process looks up itself."""
        ending_s = settings.drain_s + settings.shutdown_timeout_s
        limits = ScorerLimits(settings.max_scorer_bytes, settings.scorer_timeout_s, ending_s)
        return cls(Model(settings.root, name, settings.owner), settings, placer, scorer_limits=limits)

    def begin(self) -> None:
        """Attaches and serves the first state, or the next if that goes meanwhile. Errors: as of `attach`,
        VersionError if none is live."""
        began = time.monotonic()
        while True:
            state = self._first()
            try:
                is_early = time.monotonic() < began + _OWNERS_S
                self.swap(self.attach(self.agreed(state, is_early)))
                break
            except (LoaderError, ServingError) as error:
                if time.monotonic() > began + _BEGIN_S or not self.is_passing(state, error):
                    raise
            time.sleep(_AGAIN_S)
        served = self.served()
        tables, mb = len(served.header.tables), served.segment.size / 1e6
        said = (self.model.name, served.state, tables, mb, served.backend.description)
        logger.info("serving %s version %s: %d tables, %.1f MB, lookups on %s", *said)

    def _first(self) -> State:
        return good_state(self.model)

    @property
    def cache(self) -> CacheState | None:
        """The GPU's cache that all models share, or None."""
        if (cache := self._placer.cache) is None:
            return None
        held = cache.statistics()
        return CacheState(str(cache.device), held.slots, held.occupied, cache.bytes)

    def served(self) -> ServedVersion:
        """Returns the version that answers. ApiError: none is attached, or its rows are damaged without
        another."""
        if self._unusable is not None:
            raise self._unusable
        return self.attached()

    def attached(self) -> ServedVersion:
        """Returns the attached version, usable or not. ApiError: none yet."""
        if self._served is None:
            raise not_found(f"model {self.model.name!r} is not ready")
        return self._served

    def held(self) -> list[ServedVersion]:
        """Returns the attached version, and those that requests named. ApiError: none yet."""
        return [self.attached(), *(one.served for one in list(self._explicit.values()))]

    @property
    def is_usable(self) -> bool:
        """Whether requests are answered: the rows are good, or another version is there."""
        return self._unusable is None

    @property
    def unusable_because(self) -> str:
        """Why requests are not answered; "" if they are."""
        return "" if self._unusable is None else self._unusable.message

    def agreed(self, wanted: State, lacks_none: bool = False) -> State:
        """Returns the state to serve in place of a live one: itself where all tables are here, else
        `Agreement.next`, or `Agreement.first`. Blocks. NotAgreed."""
        served = self._served
        if served is not None and served.version == wanted.version:
            header = served.header
        else:
            header = self.model.attach(wanted.version, "header").header
        if not header.owned:
            return wanted
        if served is None:
            return self._agreement.first(wanted, header.owned, lacks_none)
        is_patient = self.behind_s < self._settings.disk_timeout_s
        return self._agreement.next(wanted, header.owned, served.state, served.sequence, is_patient)

    def shall_hold(self) -> bool:
        """Whether the caller is to `hold` now."""
        return self._served is not None and self._agreement.shall_hold(self._served.header.owned)

    def hold(self) -> None:
        """Has the owners of remote tables keep the states that are attached. Blocks."""
        self._agreement.hold([version.segment for version in self.held()])

    def attach(self, state: State | None = None, *, as_successor: bool = False) -> ServedVersion:
        """Maps, verifies, places and warms up a state (None: the live one) without serving it. as_successor:
        it may take the served one's room and cached rows, and is swapped in at once. LoaderError, QuantError,
        ServingError, OSError: it cannot be served here."""
        before, verify = self._served, self._settings.verify
        model = self.model.on(self._placer.node)
        segment = attach_state(model, state, "header", None if before is None else before.segment)
        known = () if before is None else before.segment.deltas
        for delta in segment.deltas:
            if delta not in known:
                self.model.verify(delta.segment, verify)
        if before is not None and segment.base is before.segment.base:
            return before.with_deltas(
                segment, self._placer.place(segment, before.placed if as_successor else None)
            )
        replaced = before.placed if before is not None and as_successor else None
        is_gpu = self._placer.gpu is not None
        threads, rest = (1, _REST) if before is not None else (_VERIFIERS if is_gpu else 1, 0.0)
        checked = self._placer.disk.checked(segment, self._placer.kinds(segment, replaced))
        for name in segment.base.keep_indexes(checked):
            logger.warning(
                "the id index of table %s may leave memory, and then a lookup waits for it: raise the limit "
                "of locked memory (ulimit -l; docker run --ulimit memlock=-1)",
                name,
            )
        read = partial(self.model.verify, segment.base, verify, threads, rest, checked)
        if not is_gpu:
            at = read()
            return self._attach(segment, replaced, checked, lambda: at)
        if verify != "header" and (verify == "always" or self.model.verified_at(segment.base) is None):
            segment.base.verify_indexes()
        # rows, while they are copied and kernels are loaded
        with ThreadPoolExecutor(1, "tableside-verify") as beside:
            return self._attach(segment, replaced, checked, beside.submit(read).result)

    def _attach(
        self,
        segment: Segment,
        replaced: Placements | None,
        checked: Collection[str],
        verified: Callable[[], float],
    ) -> ServedVersion:
        """The rest of `attach`. replaced: gives its room. checked: tables whose rows are checked as they are
        read. verified: waits until all others were; returns when."""
        clock = Steps()
        try:
            placed = self._placer.place(segment, replaced, checked)
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
            )
            served.warm_up()
            if self._placer.gpu is not None and served.scorer is not None and served.scorer.calls is not None:
                self._placer.gpu.launcher.warm_up_follower(
                    partial(served.scorer.calls.warm_up, served.scorer.admit)
                )
            clock.mark("warm-up")
            served.verified_at = verified()
            clock.mark("rest of verifying")
            served.placed.take_over()
        except UNUSABLE:
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
        """Answers from `served` from the next request on."""
        self._served, self._unusable, self._behind_since = served, None, 0.0
        self._note(self._live)

    def close(self) -> None:
        """Stops serving the model."""

    def changed(self) -> State | None:
        """Returns the state to serve instead, or None: the live one unless served or refused; the last good
        version if served rows are damaged; the served one if its hot rows changed."""
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
        if not wanted or wanted[0] != served:
            return wanted[0] if wanted else None
        now = self._served
        return served if now is not None and self._placer.has_hotter(now.segment, now.placed) else None

    def _note(self, live: State) -> None:
        """Notes since when the live state differs from the served one."""
        is_behind = self._served is not None and live.version and live != self._served.state
        self._behind_since = (self._behind_since or time.monotonic()) if is_behind else 0.0

    @property
    def behind_s(self) -> float:
        """Seconds since the live state differs from the served one; 0: it does not."""
        return time.monotonic() - self._behind_since if self._behind_since else 0.0

    def refuse(self, state: State) -> bool:
        """Remembers until the next live state that `state` cannot be served. Returns whether that is new."""
        is_new = state not in self._refused
        self._refused.add(state)
        return is_new

    def is_passing(self, state: State, error: Exception) -> bool:
        """Returns whether an attach error passes: a newer state is live, or an engine process is being
        replaced. LoaderError, OSError: the live state is unknown."""
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
        """Logs a line unless it was the last one."""
        if line != self._last_warning:
            logger.warning("%s", line)
        self._last_warning = line

    def find(self, version: int) -> ServedVersion | None:
        if self._served is not None and self._served.version == version:
            return self._served
        named = self._explicit.get(version)
        return None if named is None else named.served

    def find_state(self, state: State) -> ServedVersion | None:
        if self._served is not None and self._served.state == state:
            return self._served
        named = self._explicit.get(state.version)
        return named.served if named is not None and named.served.state == state else None

    def forget_removed(self) -> None:
        """Drops versions named by requests that were removed or damaged, or that owners are to agree on
        anew."""
        if not self._explicit:
            return
        good = set(self.model.versions()) - set(self.model.damaged_versions())
        old = time.monotonic() - _NAMED_S
        for version, named in list(self._explicit.items()):  # a copy: a thread may attach one meanwhile
            is_old = bool(named.served.header.owned) and named.at < old
            if version not in good or is_old:
                self._explicit.pop(version, None)

    def attach_explicit(self, version: int, state: State | None = None) -> ServedVersion:
        """Attaches a version that a request named, in a state (None: its newest). One call at a time.
        ApiError 404: it is not published or cannot be served; the log has the reason, as clients learn no
        paths."""
        remote: Sequence[RemoteTable] = ()
        while True:
            published = self.model.versions()
            if version not in published:
                known = ", ".join(map(str, published)) or "none"
                why = f"version {version} of model {self.model.name!r} is not published"
                raise not_found(f"{why}; versions there: {known}")
            wanted = state or resolve(self.model, version)
            try:
                if state is None and (remote := self.model.attach(version, "header").header.owned):
                    wanted = self._agreement.of_version(wanted, remote)
                served = self.attach(wanted)
                break
            except NotAgreed:
                raise
            except UNUSABLE as error:
                is_gone = isinstance(error, (VersionError, ApiError)) and not remote
                # changes came, and this state went
                if is_gone and (newest := resolve(self.model, version)) != wanted:
                    state = newest
                    continue
                said = (version, self.model.name, error)
                logger.error("version %d of %s, which a request named, is not taken: %s", *said)
                what = f"version {version} of model {self.model.name!r}"
                raise not_found(f"{what} cannot be served; the server's log has the reason") from error
        self._explicit[version] = _Named(served, time.monotonic())
        if len(self._explicit) > _EXPLICIT_VERSIONS:
            self._explicit.popitem(last=False)
        return served
