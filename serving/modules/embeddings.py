"""`EmbeddingBags` and `Embeddings`: a published model's features as PyTorch modules.

They hold no weights: a lookup dequantizes rows of the version in shared memory. Under torch.compile and
torch.export a call becomes an operator (`serving.modules.dispatch`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypedDict, Unpack

import torch

from tableside.quant import Pooling
from tableside.quant.contract import Unfound
from tableside.serving.modules.dispatch import (
    Call,
    Padding,
    look_up,
    look_up_packed,
    lookup_of,
    traced,
    traced_packed,
)
from tableside.serving.modules.inputs import (
    FeatureInput,
    FeatureTensors,
    Form,
    Leaf,
    ModuleError,
    NotATensor,
    NotInMemory,
    PackedInput,
    given_bags,
    given_ids,
    is_traced,
    outside_graphs,
)
from tableside.serving.modules.lookups import (
    OUTPUTS,
    host_jagged,
    ids_between,
    ids_of,
    is_keyed,
    jagged_tensors,
    keyed_tensor,
    packed_of,
    places_of,
)
from tableside.serving.modules.published import ModuleSource, published


class SourceOptions(TypedDict, total=False):
    """Options of a module's tables; see `ModuleSource`."""

    root: str | None
    version: int | None
    device: str
    placement: str
    hbm_budget: int | None
    threads: int | None
    backend: str
    verify: str
    owner: str | None


class PublishedModule(Leaf):
    """The base of both modules: features of one model, in this process's attachment.

    features: None: all with the module's pooling. output: dtype of the vectors. follow: "live": take a newly
    live version between two calls; None: keep `version`, or the one live now. Copies share the tables. A
    pickle holds names, and attaches where it is read. `.to()` refuses to move tables. LoaderError,
    QuantError, ServingError: the model or a feature is missing.
    """

    _poolings: tuple[Pooling, ...]
    _padding: Padding = ()

    def __init__(
        self,
        model: str,
        features: Sequence[str] | None = None,
        *,
        output: torch.dtype = torch.float32,
        follow: Literal["live"] | None = "live",
        **options: Unpack[SourceOptions],
    ) -> None:
        super().__init__()
        if output not in OUTPUTS:
            raise ModuleError(f"output is {output}; expected one of: {', '.join(map(str, OUTPUTS))}")
        source = ModuleSource(model, **options)
        if follow is None and source.version is None:
            source = replace(source, version=published(source).now().version)
        elif follow not in ("live", None) or (follow == "live" and source.version is not None):
            raise ModuleError(
                f"follow is {follow!r} with version {source.version}; expected follow='live' without a "
                "version, or follow=None"
            )
        self.output = output
        self._published = published(source)
        self.features, self.dims = self._choose(features)
        self._call = self._to_call()

    def _to_call(self) -> str:
        output = str(self.output).removeprefix("torch.")
        return Call(
            self._published.source.to_string(), self.features, self.dims, output, self._padding
        ).to_string()

    def _choose(self, wanted: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Returns the features and their dims. ModuleError: one is missing, or has another pooling."""
        served = self._published.now().served
        here = {n: b for n, b in served.features.items() if b.pooling in self._poolings}
        names = tuple(here) if wanted is None else tuple(wanted)
        labels = " or ".join(p.label for p in self._poolings)
        if wrong := [n for n in names if n not in here]:
            there = ", ".join(f"{n} ({b.pooling.label})" for n, b in served.features.items())
            raise ModuleError(
                f"model {served.header.model!r} version {served.version} has no feature "
                f"{', '.join(map(repr, wrong))} of pooling {labels}; it has: {there or 'none'}"
            )
        if not names:
            raise ModuleError(
                f"model {served.header.model!r} has no feature of pooling {labels}; publish it with one"
            )
        self._published.require({n: here[n] for n in names})
        return names, tuple(here[n].table.dim for n in names)

    # ---- versions ----

    @property
    def model(self) -> str:
        """The model's name."""
        return self._published.source.model

    @property
    def version(self) -> int:
        """The version that the next call reads."""
        return self._published.now().version

    def refresh(self) -> bool:
        """Takes the live version now; returns whether it changed."""
        return self._published.look()

    def check(self) -> None:
        """Waits for the calls on a GPU of all modules of the source. BadFeatureIds: one had a wrong id or
        length, which a later call would report otherwise. CPU calls report their own."""
        self._published.pending.check()

    def missing_ids(self) -> dict[str, Unfound]:
        """Counts ids without a row per feature, over all calls of this process on these tables: `missing` got
        the default row, `backfilled` an older version's. Waits for the GPU, so do not call it during a
        capture."""
        return self._published.missing.of(self.features)

    @property
    def _where(self) -> str:
        return self._published.source.device

    # ---- what PyTorch does with modules ----

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves nothing. ModuleError: `fn` would move tables, or change the type of vectors."""
        device = torch.device("cpu" if self._where == "interpreter" else self._where)
        moved = fn(torch.empty(0, dtype=self.output, device=device))
        if moved.device != device or moved.dtype != self.output:
            raise ModuleError(
                f"the tables of model {self.model!r} stay on {device} and give {self.output}; for "
                f"{moved.device} and {moved.dtype} make another module, with device={str(moved.device)!r} "
                f"and output={moved.dtype}"
            )
        return self

    def share_memory(self) -> Self:
        """The tables are in shared memory already."""
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the names for a state dict, no rows."""
        return {"model": self.model, "version": self.version}

    def set_extra_state(self, state: Any) -> None:
        """ModuleError: the state is of another model, or of another version and this one stays at its own."""
        found = (state.get("model"), state.get("version")) if isinstance(state, dict) else (None, None)
        pinned = self._published.source.version
        if found[0] != self.model or (pinned is not None and found[1] != pinned):
            raise ModuleError(
                f"the state is of model {found[0]!r} version {found[1]}; this module reads {self.model!r} "
                f"version {self.version}; make a module of that model, or leave its state out (strict=False)"
            )

    def extra_repr(self) -> str:
        source = self._published.source
        following = "live" if source.version is None else f"version {source.version}"
        where = f"device={self._where!r}, output={self.output}"
        return f"{self.model!r}, {following}, features={list(self.features)}, {where}"

    # ---- calls ----

    def _given_of(self, inputs: Mapping[str, FeatureInput]) -> list[FeatureTensors]:
        if type(inputs) is not dict and not isinstance(inputs, Mapping):
            raise NotATensor(
                f"the call has {type(inputs).__name__}; expected a dict of features, each with its "
                "torch.Tensor"
            )
        found = [self._given(name, inputs[name]) for name in self.features if name in inputs]
        if len(found) == len(inputs) == len(self.features):
            return found
        lacks = [n for n in self.features if n not in inputs]
        unknown = [str(n) for n in inputs if n not in self.features]
        raise ModuleError(
            f"the call lacks {', '.join(lacks) or 'nothing'} and has {', '.join(unknown) or 'nothing'} "
            f"besides; expected a dict of {', '.join(self.features)}"
        )

    def prefetch(self, inputs: Any) -> Any:
        """Brings the rows of the next call with these inputs to the GPU's cache (placement "cached"), beside
        the current stream. Do not change the tensors before that call. Does nothing on the CPU or with a
        `padding_idx`."""
        if is_keyed(inputs):
            self.prefetch_keyed(inputs, self.features)
        elif (lookup := self._prefetching()) is not None:
            lookup.prefetch(self._given_of(inputs))

    def _prefetching(self) -> Any:
        """The lookup that brings rows ahead; None: there is none to bring."""
        attached = self._published.now()
        is_idle = not attached.on_gpu or self._padding or is_traced()
        return None if is_idle else lookup_of(attached, self._call)

    def prefetch_keyed(self, inputs: Any, keys: Sequence[str], is_weighted: bool = True) -> None:
        """As `prefetch`, for a KeyedJaggedTensor. keys, is_weighted: as the call has them."""
        raise NotImplementedError

    def _given(self, name: str, value: FeatureInput) -> FeatureTensors:
        raise NotImplementedError

    def _of_dict(self, inputs: Mapping[str, FeatureInput], form: Form) -> dict[str, torch.Tensor]:
        """form: of what are tuples of ids and bags; IDS where the features are not pooled."""
        if (
            not is_traced()
            and type(inputs) is dict
            and len(inputs) == len(self.features)
            and not self._padding
        ):
            lookup, names = lookup_of(self._published.now(), self._call), self.features
            if (found := lookup.plain(list(map(inputs.get, names)), form)) is not None:
                return dict(zip(names, found, strict=True))
        return dict(zip(self.features, self._vectors(self._given_of(inputs)), strict=True))

    def _vectors(self, given: list[FeatureTensors]) -> list[torch.Tensor]:
        if is_traced():
            return traced(self._call, self.features, given)
        try:
            return look_up(self._published.now(), self._call, given)
        except NotInMemory:
            return traced(self._call, self.features, given)


class EmbeddingBags(PublishedModule):
    """Pooled features of any dims, row formats and poolings, looked up together. include_last_offset: as of
    torch.nn.EmbeddingBag. padding_idx: feature -> an id excluded from sums and means."""

    _poolings = (Pooling.SUM, Pooling.MEAN)

    def __init__(
        self,
        model: str,
        features: Sequence[str] | None = None,
        *,
        output: torch.dtype = torch.float32,
        follow: Literal["live"] | None = "live",
        include_last_offset: bool = False,
        padding_idx: Mapping[str, int] | None = None,
        **options: Unpack[SourceOptions],
    ) -> None:
        super().__init__(model, features, output=output, follow=follow, **options)
        self.include_last_offset = include_last_offset
        if padding_idx:
            if unknown := [str(name) for name in padding_idx if name not in self.features]:
                raise ModuleError(
                    f"padding_idx names {', '.join(unknown)}; expected some of: {', '.join(self.features)}"
                )
            self._padding = tuple(padding_idx.get(name) for name in self.features)
            self._call = self._to_call()

    def forward(self, inputs: Any) -> Any:
        """Returns a dict of [bags, dim] for a dict of features (`serving.modules.inputs`), or a KeyedTensor
        for a KeyedJaggedTensor with the module's features in any order. BadFeatureIds (a ValueError): an id
        or a length is wrong. ModuleError: the input has another form."""
        if is_keyed(inputs):
            return keyed_tensor(self.features, self.dims, self.side_by_side(inputs, self.features))
        return self._of_dict(inputs, Form.ENDS if self.include_last_offset else Form.OFFSETS)

    def _given(self, name: str, value: FeatureInput) -> FeatureTensors:
        return given_bags(name, value, self.include_last_offset)

    def side_by_side(self, inputs: Any, keys: Sequence[str], is_weighted: bool = True) -> torch.Tensor:
        """Returns [bags, sum of dims] for a KeyedJaggedTensor. keys: its names of the module's features.
        is_weighted: use its weights, if any. Raises as `forward`."""
        by_offsets = self._published.source.on_gpu and not is_traced()
        order = places_of(keys, inputs.keys())
        return self._side_by_side(packed_of(inputs, order, by_offsets=by_offsets, is_weighted=is_weighted))

    def packed(
        self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns [bags, sum of dims] for the ids of all features in sequence, as FBGEMM's modules. values:
        int64 [ids], feature by feature. offsets: int64 or int32 [features * bags + 1]. weights: floats [ids].
        Raises as `forward`."""
        return self._side_by_side(PackedInput([], len(self.features), values, Form.ENDS, offsets, weights))

    def _side_by_side(self, packed: PackedInput) -> torch.Tensor:
        if is_traced():
            return traced_packed(self._call, self.features, packed)
        try:
            return look_up_packed(self._published.now(), self._call, packed)
        except NotInMemory:
            return traced_packed(self._call, self.features, packed)

    def prefetch_keyed(self, inputs: Any, keys: Sequence[str], is_weighted: bool = True) -> None:
        order = places_of(keys, inputs.keys())
        if (lookup := self._prefetching()) is not None:
            lookup.prefetch_packed(packed_of(inputs, order, by_offsets=True, is_weighted=is_weighted))


class Embeddings(PublishedModule):
    """Features that are not pooled: a vector for each id."""

    _poolings = (Pooling.NONE,)

    def forward(self, inputs: Any) -> Any:
        """Returns a dict of [*shape of the ids, dim] for a dict of tensors, or of JaggedTensor for a
        KeyedJaggedTensor, which is not compiled. Raises as `EmbeddingBags.forward`."""
        if is_keyed(inputs):
            return self.jagged(inputs, self.features, self.features)
        return self._of_dict(inputs, Form.IDS)

    def jagged(
        self, inputs: Any, keys: Sequence[str], names: Sequence[str], with_ids: bool = False
    ) -> dict[str, Any]:
        """Returns JaggedTensors by `names`. keys: the input's names of the module's features. with_ids: with
        the ids as weights. Raises as `forward`."""
        if is_traced():
            return self._untraced(inputs, keys, names, with_ids)
        attached, order = self._published.now(), places_of(keys, inputs.keys())
        if attached.on_gpu:
            given = self._apart(inputs, order)
        else:
            packed = packed_of(inputs, order, by_offsets=False, is_weighted=False)
            jagged = host_jagged(", ".join(inputs.keys()), packed)
            given = ids_of(jagged, order)
        vectors = look_up(attached, self._call, given)
        ids = [g.values for g in given] if with_ids else None
        return jagged_tensors(names, vectors, inputs, order, ids)

    @outside_graphs
    def _untraced(self, *given: Any) -> dict[str, Any]:
        """Calls `jagged` between two graphs of torch.compile. ModuleError: another tracer is active."""
        if is_traced():
            raise ModuleError(
                f"a KeyedJaggedTensor of {', '.join(self.features)} is not traced: how many vectors each "
                "feature gets would be that of this call; give a dict of ids"
            )
        return self.jagged(*given)

    def prefetch_keyed(self, inputs: Any, keys: Sequence[str], is_weighted: bool = True) -> None:
        order = places_of(keys, inputs.keys())
        if (lookup := self._prefetching()) is not None:
            lookup.prefetch(self._apart(inputs, order))

    def _apart(self, inputs: Any, order: list[int] | None) -> list[FeatureTensors]:
        """Splits the ids by feature on a GPU. Waits for the device, as TorchRec does, for the sizes."""
        packed = packed_of(inputs, order, by_offsets=False)
        return ids_between(packed.values, inputs.offset_per_key(), order)

    def _given(self, name: str, value: FeatureInput) -> FeatureTensors:
        return given_ids(name, value)
