"""Exported programs (`torch.export.save`, .pt2) as data: what a scorer may be, checked without torch, running nothing.

`torch.export.load` trusts its file: it unpickles sample inputs and pickled constants, evaluates strings (symbolic sizes, guards),
and takes for an operator whatever can be reached from the name `torch`. So a program is read here as what it is, a zip archive of
JSON and raw weights; everything must be known to be harmless, and an archive is written anew that holds nothing else: a graph
of ATen operators, sizes, and weights as raw bytes. That one is published, and later loaded.
"""

import io
import json
import keyword
import re
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any, NoReturn

from loader.errors import ProgramError

HOW_TO_EXPORT = (
    "export a module whose forward takes each feature's vectors and dense tensors by name, fp32 [batch, n]: "
    "torch.export.save(torch.export.export(module.eval(), (user, dense), dynamic_shapes={'user': {0: Dim('batch')}, "
    "'dense': {0: Dim('batch')}}), 'scorer.pt2')"
)
LARGEST_BYTES, LARGEST_GRAPH_BYTES = 1 << 30, 64 << 20
_PLAIN = ("archive_format", "archive_version", "byteorder", ".data/version", "version")
_CONFIGS = {"weights": re.compile(r"weight_\d+"), "constants": re.compile(r"tensor_\d+")}
_FP32 = 7  # torch._export.serde.schema.ScalarType.FLOAT
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 12: 1, 13: 2}  # by ScalarType: uint8 ... double, bool, bfloat16
# What a dense part is made of. Not among them: whatever opens files, makes views beyond a tensor's memory, or builds sparse ones
# from indices that nobody checks.
_ATEN = frozenset(
    """
    _assert_scalar _assert_tensor_metadata _log_softmax _native_batch_norm_legit_no_training _softmax _to_copy _unsafe_view
    _weight_norm abs add addbmm addcdiv addcmul addmm alias all amax amin any arange argmax argmin argsort atan avg_pool1d
    baddbmm batch_norm bitwise_and bitwise_not bitwise_or bmm cat ceil celu chunk clamp clamp_max clamp_min clone concat
    concatenate constant_pad_nd contiguous conv1d cos cosine_similarity cumsum detach detach_ diagonal div dot dropout
    einsum elu embedding eq erf exp expand expand_as expm1 eye fill flatten flip floor floor_divide fmod full full_like
    gather ge gelu glu group_norm gt hardsigmoid hardswish hardtanh index index_select isfinite isinf isnan layer_norm le
    leaky_relu lerp lift_fresh_copy linalg_vector_norm linear log log10 log1p log2 log_sigmoid log_softmax logical_and
    logical_not logical_or logical_xor logit logsumexp lt masked_fill matmul max maximum mean min minimum mish mm movedim
    mul mv nan_to_num narrow native_layer_norm ne neg new_full new_ones new_zeros norm numel ones ones_like outer pad
    permute pow prelu prod reciprocal relu relu6 remainder repeat repeat_interleave reshape rms_norm roll round rsqrt rsub
    scalar_tensor scaled_dot_product_attention select selu sigmoid sign silu sin slice softmax softplus sort split
    split_with_sizes sqrt square squeeze stack std sub sum sym_numel sym_size t tanh tile to topk transpose tril
    tril_indices triu triu_indices type_as unbind unflatten unsqueeze var view view_as where zeros zeros_like
    """.split()  # noqa: SIM905
)
_OPERATOR = re.compile(
    r"torch\.ops\.aten\.(?P<aten>[a-z]\w*|_\w+)\.\w+"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|getitem|and_|or_|not_)"
    r"|torch\.sym_(int|float|max|min|not|sum)",
    re.ASCII,
)
_ARGUMENTS = {
    *("as_tensor", "as_tensors", "as_optional_tensor", "as_optional_tensors", "as_none", "as_name", "as_expr"),
    *("as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_bools", "as_string", "as_strings"),
    *("as_sym_int", "as_sym_ints", "as_sym_float", "as_sym_floats", "as_sym_bool", "as_sym_bools"),
    *("as_scalar_type", "as_memory_format", "as_layout", "as_device"),
}
_EXPRESSION = re.compile(
    r"(?:\s+|[-+*/%(),=<>&|~]|\d+(?:\.\d+)?|'[suz]\d+'|\b(?:Symbol|Integer|Add|Mul|Max|Min|LessThan|GreaterThan|StrictLessThan|StrictGreaterThan|Equality|Unequality|FloorDiv|CeilDiv|CleanDiv|Mod|PythonMod|"
    r"ModularIndexing|TrueDiv|IntTrueDiv|ToFloat|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|positive|integer|nonnegative|True|False|[suz]\d+)\b)*",
    re.ASCII,
)
_DOTTED, _WORD = re.compile(r"[\w.]+", re.ASCII), re.compile(r"\w*", re.ASCII)
_NAMES = {"name": _WORD, "as_name": _WORD, "parameter_name": _DOTTED, "buffer_name": _DOTTED, "tensor_constant_name": _DOTTED}


@dataclass(frozen=True)
class ProgramInput:
    """One tensor that a program takes: fp32 [batch, width]."""

    name: str
    width: int


@dataclass(frozen=True)
class Program:
    """A vetted program. archive: .pt2 bytes that hold nothing but what was vetted."""

    archive: bytes
    inputs: tuple[ProgramInput, ...]


_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, EOFError, OverflowError, zlib.error)


def _refuse(why: str) -> NoReturn:
    raise ProgramError(f"{why}; {HOW_TO_EXPORT}")


def vet_program(data: bytes) -> Program:
    """Reads a .pt2 file. ProgramError: it is something else, or holds what is not an operator, a size or a raw weight."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _rewritten(archive)
    except zipfile.BadZipFile:
        _refuse("it is not a zip archive, so not an exported program (a pickled module, or a file cut short?)")
    except _UNREADABLE as error:
        _refuse(f"it is not an exported program that this release understands ({error!r})")


def _rewritten(archive: zipfile.ZipFile) -> Program:
    infos = archive.infolist()
    if len({i.filename for i in infos}) != len(infos):
        _refuse("the archive has entries of the same name")
    if sum(i.file_size for i in infos) > LARGEST_BYTES:
        _refuse(f"the archive unpacks to more than {LARGEST_BYTES:,} bytes")
    prefix, _, _ = infos[0].filename.partition("/") if infos else ("", "", "")
    names = {i.filename.removeprefix(f"{prefix}/"): i for i in infos}
    if "data.pkl" in names:
        kind = "TorchScript" if any(n.startswith("code/") for n in names) else "pickled (torch.save)"
        _refuse(f"it is {kind}, which runs code when it is loaded")
    if any(n.startswith("data/aotinductor/") for n in names):
        _refuse("it holds compiled libraries (AOTInductor)")
    models = [n for n in names if n.startswith("models/")]
    if models != ["models/model.json"]:
        _refuse(f"expected one model, models/model.json; found {', '.join(models) or 'none'}")
    if names[models[0]].file_size > LARGEST_GRAPH_BYTES:
        _refuse(f"its graph takes more than {LARGEST_GRAPH_BYTES:,} bytes")
    kept = {n: archive.read(names[n]) for n in _PLAIN if n in names}
    graph, inputs = _vet_model(json.loads(archive.read(names[models[0]])))
    kept["models/model.json"] = json.dumps(graph).encode()
    for kind, allowed in _CONFIGS.items():
        config_name = f"data/{kind}/model_{kind}_config.json"
        config = json.loads(archive.read(names[config_name]))
        for name, entry in config["config"].items():
            path = entry["path_name"]
            if not _DOTTED.fullmatch(name):
                _refuse(f"a weight has the name {name[:60]!r}")
            if entry["use_pickle"] is not False or not allowed.fullmatch(path):
                _refuse(f"{kind[:-1]} {name!r} is pickled, or not a tensor")
            _vet(entry, f"{kind[:-1]} {name!r}")
            content = archive.read(names[f"data/{kind}/{path}"])
            _check_weight(name, entry["tensor_meta"], len(content))
            kept[f"data/{kind}/{path}"] = content
        kept[config_name] = json.dumps(config).encode()
    kept["data/sample_inputs/model.pt"] = b""  # would be unpickled; nothing needs them
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as written:
        for name, content in kept.items():
            written.writestr(zipfile.ZipInfo(f"scorer/{name}"), content)
    return Program(out.getvalue(), inputs)


def _vet_model(model: dict[str, Any]) -> tuple[dict[str, Any], tuple[ProgramInput, ...]]:
    """A model's JSON with everything left out that is not needed, and its inputs."""
    module = model["graph_module"]
    graph, signature = module["graph"], module["signature"]
    for node in graph["nodes"]:
        target = node["target"]
        found = _OPERATOR.fullmatch(target) if isinstance(target, str) else None
        if not found or (found["aten"] and found["aten"] not in _ATEN):
            _refuse(f"its graph calls {target!r}; expected ATen operators alone, of those that a dense part is made of")
        if found["aten"] == "dropout" and any(i["name"] == "train" and i["arg"].get("as_bool") for i in node["inputs"]):
            _refuse("it drops values at random, as in training; call module.eval() before the export")
        node["metadata"] = {}
    _vet(module, "its graph")
    for kind in ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"):
        if not all(_WORD.fullmatch(name) for name in graph.get(kind) or ()):
            _refuse("its graph has a tensor with an odd name")
    for kind in ("script_obj_values", "custom_obj_values"):
        if graph.get(kind):
            _refuse("its graph holds custom objects")
    module.update(metadata={}, treespec_namedtuple_fields={})
    model["guards_code"] = []  # would be evaluated; sizes are checked before a program runs
    for name, bounds in model["range_constraints"].items():
        if not _WORD.fullmatch(name) or not all(b is None or type(b) is int for b in bounds.values()):
            _refuse("its sizes have bounds that are no numbers")
    model["opset_version"] = {"aten": int(model["opset_version"]["aten"])}
    model["verifiers"] = [v for v in model["verifiers"] if v in ("ATEN", "TRAINING")]

    taken = []
    for spec in signature["input_specs"]:
        (kind, what), *more = spec.items()
        if more or kind not in ("parameter", "buffer", "tensor_constant", "user_input"):
            _refuse(f"its graph has an input of the kind {kind!r}; expected tensors alone")
        if kind == "user_input":
            taken.append(what["arg"]["as_tensor"]["name"])
    names = module["module_call_graph"][0]["signature"].get("forward_arg_names") or []
    if len(names) != len(taken) or not all(isinstance(n, str) and _WORD.fullmatch(n) for n in names):
        names = taken
    # How inputs and outputs are nested is code, too: said anew. Inputs are given by position, one tensor is returned.
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    positional = {"type": "builtins.tuple", "context": "null", "children_spec": [leaf] * len(taken)}
    keywords = {"type": "builtins.dict", "context": "[]", "children_spec": []}
    in_spec = {"type": "builtins.tuple", "context": "null", "children_spec": [positional, keywords]}
    signature_of_call = {"inputs": [], "outputs": [], "in_spec": json.dumps([1, in_spec]), "out_spec": json.dumps([1, leaf])}
    module["module_call_graph"] = [{"fqn": "", "signature": {**signature_of_call, "forward_arg_names": names}}]
    outputs = [list(o) for o in signature["output_specs"]]
    if outputs != [["user_output"]] or "as_tensor" not in signature["output_specs"][0]["user_output"]["arg"]:
        _refuse(f"it returns {len(outputs)} values; expected one tensor, the scores")
    inputs = tuple(_input(str(n), graph["tensor_values"][t]) for n, t in zip(names, taken, strict=True))
    if (
        not all(i.name.isidentifier() and not keyword.iskeyword(i.name) for i in inputs)
        or not inputs
        or len({i.name for i in inputs}) != len(inputs)
    ):
        _refuse("its inputs have no names of their own")
    return model, inputs


def _check_weight(name: str, meta: dict[str, Any], size: int) -> None:
    """A weight lies within its own bytes."""
    sizes, strides = ([int(n["as_int"]) for n in meta[k]] for k in ("sizes", "strides"))
    offset, item = int(meta["storage_offset"]["as_int"]), _ITEM_BYTES.get(meta["dtype"])
    if item is None:
        _refuse(f"weight {name!r} is of a type that is not supported")
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    is_inside = min([offset, *sizes, *strides], default=0) >= 0 and (0 in sizes or (last + 1) * item <= size)
    if not is_inside:
        _refuse(f"weight {name!r} of sizes {sizes} does not lie in its {size} bytes")


def _input(name: str, tensor: dict[str, Any]) -> ProgramInput:
    sizes = tensor["sizes"]
    if len(sizes) != 2 or "as_int" not in sizes[1]:
        _refuse(f"input {name!r} has {len(sizes)} dimensions; expected [batch, n]")
    if "as_expr" not in sizes[0]:
        _refuse(
            f"input {name!r} was exported for a batch of {sizes[0].get('as_int')} alone; name its dimension 0 in dynamic_shapes"
        )
    if tensor["dtype"] != _FP32:
        _refuse(f"input {name!r} is not fp32")
    return ProgramInput(name, int(sizes[1]["as_int"]))


def _vet(value: Any, where: str) -> None:
    """Refuses subgraphs, objects, odd names, and expressions that are more than arithmetic on sizes, anywhere in a value."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key, held in item.items():
                if key in _NAMES and not (held is None or (isinstance(held, str) and _NAMES[key].fullmatch(held))):
                    _refuse(f"{where} has the name {str(held)[:60]!r}")  # names become code
                if key.startswith("as_") and key not in _ARGUMENTS:
                    _refuse(f"{where} holds a {key.removeprefix('as_')}")
                if key == "as_device" and held != {"type": "cpu", "index": None}:
                    _refuse(f"{where} names the device {held}; export it on the CPU")
            text = item.get("expr_str")
            if text is not None and (
                not isinstance(text, str) or "**" in text or "<<" in text or not _EXPRESSION.fullmatch(text)
            ):
                _refuse(f"{where} has the size {str(text)[:60]!r}, which is more than arithmetic")
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
