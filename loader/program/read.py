"""Reads a .pt2 file (`torch.export.save`), a zip archive of JSON and raw weights, to a vetted program.

`torch.export.load` is never used: it unpickles samples and constants, evaluates strings, and resolves
operators by any attribute path from `torch`.
"""

import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tableside.loader.program import vet
from tableside.loader.program.graph import BOOL, TYPES, Program, Weight, refuse

LARGEST_BYTES, LARGEST_GRAPH_BYTES = 1 << 30, 64 << 20
_MODEL = "models/model.json"
_PATHS = {"weights": re.compile(r"weight_\d+", re.ASCII), "constants": re.compile(r"tensor_\d+", re.ASCII)}
_WEIGHT_NAMES = {
    "parameter": "parameter_name",
    "buffer": "buffer_name",
    "tensor_constant": "tensor_constant_name",
}
MALFORMED: tuple[type[Exception], ...] = (LookupError, TypeError, ValueError, AttributeError)
MALFORMED += (RuntimeError, EOFError, OverflowError, zlib.error)


def read_program(data: bytes) -> Program:
    """Reads a .pt2 file or what `write_program` wrote. ProgramError: neither, or it breaks a rule of
    `vet`."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(_Entries(archive))
    except zipfile.BadZipFile:
        refuse("it is not a zip archive, so not an exported program (a pickled module, or a file cut short?)")
    except MALFORMED as error:
        refuse(
            f"it is not an exported program that this release understands ({type(error).__name__}: "
            f"{str(error)[:200]})"
        )


class _Entries:
    """The archive's entries by name, without the folder that all of them lie in."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        infos = archive.infolist()
        if len({i.filename for i in infos}) != len(infos):
            refuse("the archive has entries of the same name")
        if sum(i.file_size for i in infos) > LARGEST_BYTES:
            refuse(f"the archive unpacks to more than {LARGEST_BYTES:,} bytes")
        prefix, _, _ = infos[0].filename.partition("/") if infos else ("", "", "")
        self._archive = archive
        self._infos = {i.filename.removeprefix(f"{prefix}/"): i for i in infos}
        self._weights: dict[str, bytes] = {}
        _check_kind(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def json(self, name: str) -> Any:
        if self._infos[name].file_size > LARGEST_GRAPH_BYTES:
            refuse(f"{name} takes more than {LARGEST_GRAPH_BYTES:,} bytes")
        return json.loads(self._archive.read(self._infos[name]))

    def weight(self, name: str) -> bytes:
        """Returns the bytes of a weight, one object however often it is asked for."""
        if name not in self._weights:
            self._weights[name] = self._archive.read(self._infos[name])
        return self._weights[name]


def _check_kind(names: Mapping[str, Any]) -> None:
    """It is an exported program, of one graph."""
    if "data.pkl" in names:
        kind = "TorchScript" if any(n.startswith("code/") for n in names) else "pickled (torch.save)"
        refuse(f"it is {kind}, which runs code when it is loaded")
    if any(n.startswith("data/aotinductor/") for n in names):
        refuse("it holds compiled libraries (AOTInductor)")
    if (models := [n for n in names if n.startswith("models/")]) != [_MODEL]:
        refuse(f"expected one model, {_MODEL}; found {', '.join(models)[:200] or 'none'}")


def _read(entries: _Entries) -> Program:
    model = entries.json(_MODEL)
    module = model["graph_module"]
    graph, signature = module["graph"], module["signature"]
    for kind in ("script_obj_values", "custom_obj_values"):
        if graph.get(kind):
            refuse("its graph holds custom objects")
    values, stored = _inputs(signature)
    weights = _weights(entries, stored)
    names = module["module_call_graph"][0]["signature"].get("forward_arg_names") or []
    if len(names) != len(values):
        names = values
    declared = [graph["tensor_values"][v] for v in values]
    inputs = tuple(vet.program_input(n, d) for n, d in zip(names, declared, strict=True))
    if not inputs or len({i.name for i in inputs}) != len(inputs):
        refuse("its inputs have no names of their own")
    bounds = [vet.rows(i.name, d, model["range_constraints"]) for i, d in zip(inputs, declared, strict=True)]
    rows = max(least for least, _ in bounds), min(most for _, most in bounds)
    result, nodes = vet.result(signature), vet.nodes(graph["nodes"])
    vet.check_order((*(w.name for w in weights), *values), nodes, result)
    program = Program(inputs, tuple(values), rows, weights, nodes, result)
    program.trial_rows()
    return program


def _inputs(signature: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Returns the graph's names of the request's inputs, and of weights with their stored names."""
    values: list[str] = []
    stored: dict[str, str] = {}
    for spec in signature["input_specs"]:
        ((kind, what),) = spec.items()
        if kind == "user_input":
            values.append(vet.check_name(what["arg"]["as_tensor"]["name"]))
        elif kind in _WEIGHT_NAMES:
            stored[vet.check_name(what["arg"]["name"])] = what[_WEIGHT_NAMES[kind]]
        else:
            refuse(f"its graph has an input of the kind {kind[:40]!r}; expected tensors alone")
    return values, stored


def _weights(entries: _Entries, stored: Mapping[str, str]) -> tuple[Weight, ...]:
    """Returns the weights of a graph, from both of the archive's lists."""
    found: dict[str, tuple[str, Any]] = {}
    for kind, path in _PATHS.items():
        if (name := f"data/{kind}/model_{kind}_config.json") not in entries:
            continue
        for weight, entry in entries.json(name)["config"].items():
            if entry["use_pickle"] is not False or not path.fullmatch(entry["path_name"]):
                refuse(f"{kind[:-1]} {weight[:60]!r} is pickled, or not a tensor")
            found[weight] = (f"data/{kind}/{entry['path_name']}", entry["tensor_meta"])
    return tuple(_weight(name, found[key][1], entries.weight(found[key][0])) for name, key in stored.items())


def _weight(name: str, meta: Mapping[str, Any], content: bytes) -> Weight:
    """Returns a weight that lies within its own bytes, and holds values of its type."""
    sizes, strides = (tuple(vet.weight_int(n) for n in meta[k]) for k in ("sizes", "strides"))
    dtype = vet.dtype(meta["dtype"])
    weight = Weight(name, dtype, sizes, strides, vet.weight_int(meta["storage_offset"]), content)
    _check_is_inside(weight)
    if dtype == BOOL and np.frombuffer(content, np.uint8).max(initial=0) > 1:
        refuse(f"weight {name!r} is of booleans and holds bytes that are neither 0 nor 1")
    return weight


def _check_is_inside(weight: Weight) -> None:
    sizes, strides, offset = weight.sizes, weight.strides, weight.offset
    (_, item), size = TYPES[weight.dtype], len(weight.content)
    elements = math.prod(sizes)
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    is_inside = min([offset, *sizes, *strides], default=0) >= 0 and (
        elements == 0 or (last + 1) * item <= size
    )
    is_large = elements * item > size or (elements == 0 and max((offset, *sizes)) > size)
    if not is_inside or is_large or len(sizes) > 32:
        refuse(f"weight {weight.name!r} of sizes {list(sizes)[:8]} does not lie in its {size} bytes")
