"""Exported programs (`torch.export.save`, .pt2) as data: what a scorer may be, checked without torch, running nothing.

`torch.export.load` trusts its file: it unpickles sample inputs and pickled constants, evaluates strings (symbolic sizes, guards),
and takes for an operator whatever can be reached from the name `torch`. So a program is read here as what it is, a zip archive of
JSON and raw weights; everything must be known to be harmless, and an archive is written anew that holds nothing else: a graph
of ATen operators, sizes, and weights as raw bytes. That one is published, and later loaded.
"""

import io
import json
import re
import zipfile
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
_OPERATORS = re.compile(
    r"torch\.ops\.aten\.\w+\.\w+"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|getitem|and_|or_|not_)"
    r"|torch\.sym_(int|float|max|min|not|sum)"
)
_REFUSED_OPERATORS = re.compile(r"torch\.ops\.aten\.(from_file|set_|_print|record_stream)\b.*")
_EXPRESSION = re.compile(
    r"(?:\s+|[-+*/%(),=<>&|~]|\d+(?:\.\d+)?|'[suz]\d+'|\b(?:Symbol|Integer|Max|Min|FloorDiv|CeilDiv|CleanDiv|Mod|PythonMod|"
    r"ModularIndexing|TrueDiv|IntTrueDiv|ToFloat|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|positive|integer|nonnegative|True|False|[suz]\d+)\b)*"
)
_DOTTED = re.compile(r"[\w.]+")
_NAMES = {"name": re.compile(r"\w*"), "parameter_name": _DOTTED, "buffer_name": _DOTTED, "tensor_constant_name": _DOTTED}
_TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}


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


def _refuse(why: str) -> NoReturn:
    raise ProgramError(f"{why}; {HOW_TO_EXPORT}")


def vet_program(data: bytes) -> Program:
    """Reads a .pt2 file. ProgramError: it is something else, or holds what is not an operator, a size or a raw weight."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _rewritten(archive)
    except zipfile.BadZipFile:
        _refuse("it is not a zip archive, so not an exported program (a pickled module, or a file cut short?)")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, NotImplementedError, EOFError) as error:
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
            kept[f"data/{kind}/{path}"] = archive.read(names[f"data/{kind}/{path}"])
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
        if not isinstance(target, str) or not _OPERATORS.fullmatch(target) or _REFUSED_OPERATORS.fullmatch(target):
            _refuse(f"its graph calls {target!r}; expected ATen operators alone (torch.ops.aten)")
        node["metadata"] = {}
    _vet(module, "its graph")
    if not all(re.fullmatch(r"\w+", name) for name in graph["tensor_values"]):
        _refuse("its graph has a tensor with an odd name")
    root = module["module_call_graph"][0]
    for spec in ("in_spec", "out_spec"):
        _vet_tree(json.loads(root["signature"][spec]))
    module.update(module_call_graph=[root], metadata={}, treespec_namedtuple_fields={})
    model["guards_code"] = []  # would be evaluated; sizes are checked before a program runs
    _vet(model.get("range_constraints", {}), "its constraints")

    taken = []
    for spec in signature["input_specs"]:
        (kind, what), *more = spec.items()
        if more or kind not in ("parameter", "buffer", "tensor_constant", "user_input"):
            _refuse(f"its graph has an input of the kind {kind!r}; expected tensors alone")
        if kind == "user_input":
            taken.append(what["arg"]["as_tensor"]["name"])
    names = root["signature"].get("forward_arg_names") or []
    if len(names) != len(taken):
        names = taken
    outputs = [list(o) for o in signature["output_specs"]]
    if outputs != [["user_output"]] or "as_tensor" not in signature["output_specs"][0]["user_output"]["arg"]:
        _refuse(f"it returns {len(outputs)} values; expected one tensor, the scores")
    inputs = tuple(_input(str(n), graph["tensor_values"][t]) for n, t in zip(names, taken, strict=True))
    if not all(i.name.isidentifier() for i in inputs) or not inputs or len({i.name for i in inputs}) != len(inputs):
        _refuse("its inputs have no names of their own")
    return model, inputs


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
                if key in ("as_graph", "as_custom_obj", "as_script_object", "as_operator"):
                    _refuse(f"{where} holds a {key.removeprefix('as_')}")
            text = item.get("expr_str")
            if text is not None and (not isinstance(text, str) or "**" in text or not _EXPRESSION.fullmatch(text)):
                _refuse(f"{where} has the size {str(text)[:60]!r}, which is more than arithmetic")
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _vet_tree(spec: Any) -> None:
    stack = [spec[1]]
    while stack:
        node = stack.pop()
        if node["type"] not in _TREES:
            _refuse(f"it takes or returns a {node['type']!r}; expected tensors")
        stack.extend(node["children_spec"])
