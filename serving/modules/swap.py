"""`swap_embeddings`: replaces a trained model's embedding modules by modules that read published tables."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack

import torch

from tableside.quant import Pooling
from tableside.serving.model.version import ServedVersion
from tableside.serving.modules.embeddings import EmbeddingBags, Embeddings, SourceOptions
from tableside.serving.modules.inputs import Bags, FeatureInput, Leaf, ModuleError
from tableside.serving.modules.lookups import OUTPUTS, keyed_tensor
from tableside.serving.modules.published import ModuleSource, published
from tableside.serving.modules.wanted import MODES, ModuleFeature, find_feature, of_configs, of_module

Mapped = str | Mapping[str, str] | None


class SwappedModule(Leaf):
    """In place of a trained module. It holds one module over published tables, and takes no weights."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Ignores the trained module's own weights, with a warning."""
        ((name, module),) = self.named_children()
        if trained := [
            key for key in state_dict if key.startswith(prefix) and not key.startswith(f"{prefix}{name}.")
        ]:
            warnings.warn(
                f"{', '.join(trained)} of the state dict: ignored, since "
                f"{prefix.removesuffix('.') or 'this module'} reads the "
                f"published model {module.model!r}; load a checkpoint of these weights to change it",
                stacklevel=2,
            )
            for key in trained:
                del state_dict[key]
            state_dict.setdefault(f"{prefix}{name}._extra_state", module.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *more)


class SwappedBag(SwappedModule):
    """In place of a torch.nn.EmbeddingBag, and called as it is."""

    def __init__(self, bags: EmbeddingBags, old: torch.nn.EmbeddingBag) -> None:
        super().__init__()
        self.bags = bags
        self.num_embeddings, self.embedding_dim, self.mode = old.num_embeddings, old.embedding_dim, old.mode
        self.padding_idx, self.include_last_offset = old.padding_idx, old.include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[bags, dim]. Raises as `EmbeddingBags.forward`."""
        (feature,) = self.bags.features
        value: FeatureInput = Bags(input, offsets, None, per_sample_weights)
        if per_sample_weights is None and isinstance(input, torch.Tensor):  # looked up sooner
            if offsets is not None:
                value = input, offsets
            elif input.dim() == 2:
                value = input
        found: torch.Tensor = self.bags({feature: value})[feature]
        return found


class SwappedEmbedding(SwappedModule):
    """Replaces a torch.nn.Embedding. padding_idx changes no vector: the row is trained as it is."""

    def __init__(self, embeddings: Embeddings, old: torch.nn.Embedding) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = (
            old.num_embeddings,
            old.embedding_dim,
            old.padding_idx,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[*shape of the ids, dim]. Raises as `Embeddings.forward`."""
        (feature,) = self.embeddings.features
        found: torch.Tensor = self.embeddings({feature: input})[feature]
        return found


class SwappedBagCollection(SwappedModule):
    """In place of TorchRec's EmbeddingBagCollection, quantized or not, and called as it is."""

    def __init__(
        self, bags: EmbeddingBags, wanted: Sequence[ModuleFeature], configs: list[Any], is_weighted: bool
    ) -> None:
        super().__init__()
        self.bags, self._configs, self._is_weighted = bags, configs, is_weighted
        self._keys, self._names = [w.input for w in wanted], [w.output for w in wanted]

    def forward(self, features: Any) -> Any:
        """Returns a KeyedTensor. Raises as `EmbeddingBags.forward`. ModuleError: weights are missing."""
        self._check_weights(features)
        values = self.bags.side_by_side(features, self._keys, self._is_weighted)
        return keyed_tensor(self._names, self.bags.dims, values)

    def prefetch(self, features: Any) -> None:
        """As `EmbeddingBags.prefetch`, for the KeyedJaggedTensor of the next call."""
        self._check_weights(features)
        self.bags.prefetch_keyed(features, self._keys, self._is_weighted)

    def embedding_bag_configs(self) -> list[Any]:
        """As the collection that was replaced."""
        return self._configs

    def _check_weights(self, features: Any) -> None:
        if self._is_weighted and features.weights_or_none() is None:
            raise ModuleError(
                f"the collection of {', '.join(self._names)} is weighted; expected a KeyedJaggedTensor with "
                "weights"
            )

    def is_weighted(self) -> bool:
        return self._is_weighted


class SwappedCollection(SwappedModule):
    """In place of TorchRec's EmbeddingCollection, quantized or not, and called as it is."""

    def __init__(
        self, embeddings: Embeddings, wanted: Sequence[ModuleFeature], configs: list[Any], need_indices: bool
    ) -> None:
        super().__init__()
        self.embeddings, self._configs, self._need_indices = embeddings, configs, need_indices
        self._keys, self._names = [w.input for w in wanted], [w.output for w in wanted]

    def forward(self, features: Any) -> dict[str, Any]:
        """A dict of JaggedTensor. Raises as `Embeddings.forward`."""
        return self.embeddings.jagged(features, self._keys, self._names, self._need_indices)

    def prefetch(self, features: Any) -> None:
        """As `Embeddings.prefetch`, for the KeyedJaggedTensor of the next call."""
        self.embeddings.prefetch_keyed(features, self._keys)

    def embedding_configs(self) -> list[Any]:
        """As the collection that was replaced."""
        return self._configs

    def need_indices(self) -> bool:
        return self._need_indices


class _Found(NamedTuple):
    """A module that is to be replaced. path: without what DistributedModelParallel puts before it. refused:
    why it cannot be; empty: it can."""

    path: str
    old: torch.nn.Module
    wanted: list[ModuleFeature]
    refused: list[str]


def swap_embeddings(
    module: torch.nn.Module,
    model: str,
    mapping: Mapping[str, Mapped] | None = None,
    *,
    output: torch.dtype | None = None,
    follow: Literal["live"] | None = "live",
    **options: Unpack[SourceOptions],
) -> dict[str, torch.nn.Module]:
    """Replaces every nn.EmbeddingBag, nn.Embedding and TorchRec collection below `module`, sharded or not;
    returns them by path.

    mapping: path -> its feature, or {a collection's feature: the model's}, or None: keep; others are found as
    `serving.modules.wanted` says. output: None: each module's dtype. follow, options: as for `EmbeddingBags`.
    ModuleError lists all mismatches of names, rows, dims, poolings and options; nothing is replaced then.
    """
    mapping = mapping or {}
    source = ModuleSource(model, **options)
    served = published(source).now().served
    everything = dict(_embeddings(module))
    found = {place: f for place, f in everything.items() if mapping.get(f.path, "") is not None}
    problems = [
        f"{path}: no embedding module is there"
        for path in mapping
        if path not in {f.path for f in everything.values()}
    ]
    if not found and not problems:
        raise ModuleError(
            f"{type(module).__name__} holds no embedding modules; give the module that holds them"
        )
    chosen = [_choose(f, served, mapping.get(f.path), problems) for f in found.values()]
    if problems:
        raise ModuleError(
            f"model {model!r} version {served.version} does not fit the module:\n  " + "\n  ".join(problems)
        )
    made: dict[int, torch.nn.Module] = {}
    for (place, one), features in zip(found.items(), chosen, strict=True):
        if id(one.old) not in made:
            dtype = _output_of(one.old) if output is None else output
            made[id(one.old)] = _replacement(one, model, features, output=dtype, follow=follow, **options)
        parent, _, name = place.rpartition(".")
        setattr(module.get_submodule(parent), name, made[id(one.old)])
    for parallel in module.modules():
        if any(
            base.__name__ in _PARALLEL for base in type(parallel).__mro__
        ):  # whose optimizer has the shards
            parallel._optim = parallel._init_optim(parallel._dmp_wrapped_module)  # type: ignore[operator]  # TorchRec's
    return {f.path: f.old for f in found.values()}


_PARALLEL = ("DistributedModelParallel", "DMPCollection")


def _embeddings(module: torch.nn.Module) -> Iterator[tuple[str, _Found]]:
    """The modules that can be replaced, not those inside of them, and where each is. A module at two paths
    comes twice."""
    inside: list[str] = []
    wrapped = getattr(module, "_dmp_wrapped_module", None)
    is_double = isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    wraps = "" if wrapped is None else f"_dmp_wrapped_module.{'module.' * is_double}"
    for path, old in module.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{p}.") for p in inside):
            continue
        if (found := _found(path.removeprefix(wraps), old)) is None:
            continue
        if not path:
            raise ModuleError(
                f"{type(old).__name__} itself cannot be replaced in place; give the module that holds it"
            )
        inside.append(path)
        yield path, found


def _found(path: str, old: Any) -> _Found | None:
    if isinstance(old, torch.nn.EmbeddingBag):
        refused = [f"mode {old.mode!r} is not served"] if old.mode not in ("sum", "mean") else []
        return _Found(path, old, of_module(path, old, MODES.get(old.mode)), refused + _norm(old))
    if isinstance(old, torch.nn.Embedding):
        return _Found(path, old, of_module(path, old, Pooling.NONE), _norm(old))
    name = type(old).__name__  # TorchRec's, which need not be installed
    pooled, bare = _told(old, "embedding_bag_configs"), _told(old, "embedding_configs")
    if isinstance(old, (SwappedBagCollection, SwappedCollection)):
        return None
    if pooled is None and bare is None:
        if not any(base.__name__ == "ShardedModule" for base in type(old).__mro__):
            return None
        why = f"{name} is sharded over ranks; swap in the model before DistributedModelParallel shards it"
        return _Found(path, old, [], [why])
    refused = (
        [f"{name} maps or weighs ids itself, which is not served"]
        if "Managed" in name or "FeatureProcessed" in name
        else []
    )
    if pooled is not None:
        return _Found(path, old, of_configs(path, "embedding_bags", pooled, True), refused)
    return _Found(path, old, of_configs(path, "embeddings", bare, False), refused)


def _told(old: Any, name: str) -> Any:
    """Returns what a TorchRec collection says by a method or, where it is sharded, keeps; None: neither."""
    told = getattr(old, name, None)
    return told() if callable(told) else getattr(old, f"_{name}", None)


def _norm(old: torch.nn.EmbeddingBag | torch.nn.Embedding) -> list[str]:
    if old.max_norm is None:
        return []
    return [
        f"max_norm {old.max_norm} changes rows as they are read, which is not served; train the norm into "
        "the weights"
    ]


def _choose(one: _Found, served: ServedVersion, mapped: Mapped, problems: list[str]) -> list[str]:
    """Finds the published features of a module; appends mismatches to `problems`."""
    problems += [f"{one.path}: {reason}" for reason in one.refused]
    names = []
    for wanted in one.wanted:
        of_it = mapped if isinstance(mapped, str) else (mapped or {}).get(wanted.output)
        name, problem = find_feature(wanted, served, of_it)
        if problem is not None:
            problems.append(f"{one.path}: {problem}")
        names.append(name)
    if isinstance(mapped, Mapping) and (unknown := set(mapped) - {w.output for w in one.wanted}):
        problems.append(f"{one.path}: has no feature {', '.join(sorted(unknown))}, which `mapping` names")
    return names


def _output_of(old: Any) -> torch.dtype:
    """Returns a module's dtype, if tables can give it."""
    if isinstance(old, torch.nn.EmbeddingBag | torch.nn.Embedding):
        return old.weight.dtype if old.weight.dtype in OUTPUTS else torch.float32
    found = old.output_dtype() if callable(getattr(old, "output_dtype", None)) else torch.float32
    return found if found in OUTPUTS else torch.float32


def _replacement(one: _Found, model: str, features: list[str], **options: Any) -> torch.nn.Module:
    old: Any = one.old
    if one.wanted[0].pooling is Pooling.NONE:
        embeddings = Embeddings(model, features, **options)
        if isinstance(old, torch.nn.Embedding):
            return SwappedEmbedding(embeddings, old)
        configs, needs_ids = _told(old, "embedding_configs"), bool(_told(old, "need_indices"))
        return SwappedCollection(embeddings, one.wanted, configs, needs_ids)
    if isinstance(old, torch.nn.EmbeddingBag):
        padding = None if old.padding_idx is None else {features[0]: old.padding_idx}
        bags = EmbeddingBags(
            model, features, include_last_offset=old.include_last_offset, padding_idx=padding, **options
        )
        return SwappedBag(bags, old)
    configs, is_weighted = _told(old, "embedding_bag_configs"), bool(_told(old, "is_weighted"))
    return SwappedBagCollection(EmbeddingBags(model, features, **options), one.wanted, configs, is_weighted)
