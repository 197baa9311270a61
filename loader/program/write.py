"""Writes a vetted program as an archive laid out like .pt2 files, with known fields only."""

import io
import json
import math
import zipfile
from typing import Any

from tableside.loader.program.graph import (
    FP32,
    Argument,
    DType,
    Item,
    MemoryFormat,
    NumberRef,
    Output,
    OwnDevice,
    Program,
    ProgramNode,
    TensorRef,
    Weight,
)

_FLOATS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def write_program(program: Program) -> bytes:
    """Returns the archive of a program: `read_program` gives the same program again."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        contents: dict[int, bytes] = {id(w.content): w.content for w in program.weights}
        paths = {key: f"weight_{n}" for n, key in enumerate(contents)}
        _put(archive, "models/model.json", json.dumps(_model(program)).encode())
        config = {w.name: _entry(w, paths[id(w.content)]) for w in program.weights}
        _put(archive, "data/weights/model_weights_config.json", json.dumps({"config": config}).encode())
        for key, content in contents.items():
            _put(archive, f"data/weights/{paths[key]}", content)
    return out.getvalue()


def _put(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(f"scorer/{name}"), content)


def _entry(weight: Weight, path: str) -> dict[str, Any]:
    meta = {
        "dtype": weight.dtype,
        "sizes": [{"as_int": n} for n in weight.sizes],
        "strides": [{"as_int": n} for n in weight.strides],
        "storage_offset": {"as_int": weight.offset},
    }
    return {"path_name": path, "use_pickle": False, "tensor_meta": meta}


def _model(program: Program) -> dict[str, Any]:
    batch = {"as_expr": {"expr_str": "batch"}}
    declared = {
        value: {"dtype": FP32, "sizes": [batch, {"as_int": i.width}]}
        for i, value in zip(program.inputs, program.values, strict=True)
    }
    inputs = [
        *({"buffer": {"arg": {"name": w.name}, "buffer_name": w.name}} for w in program.weights),
        *({"user_input": {"arg": {"as_tensor": {"name": value}}}} for value in program.values),
    ]
    outputs = [{"user_output": {"arg": {"as_tensor": {"name": program.result.name}}}}]
    return {
        "graph_module": {
            "graph": {"nodes": [_node(n) for n in program.nodes], "tensor_values": declared},
            "signature": {"input_specs": inputs, "output_specs": outputs},
            "module_call_graph": [{"signature": {"forward_arg_names": [i.name for i in program.inputs]}}],
        },
        "range_constraints": {"batch": {"min_val": program.rows[0], "max_val": program.rows[1]}},
    }


def _node(node: ProgramNode) -> dict[str, Any]:
    inputs = [{"name": name, "arg": _argument(value)} for name, value in node.arguments]
    return {"target": node.target, "inputs": inputs, "outputs": [_output(o) for o in node.outputs]}


def _output(value: Output) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {"as_tensors": [{"name": ref.name} for ref in value]}
    return _item(value)


def _argument(value: Argument) -> dict[str, Any]:
    if not isinstance(value, tuple):
        return _item(value)
    items = [_item(v) for v in value]
    kinds = {kind for item in items for kind in item}
    if kinds <= {"as_tensor", "as_none"} and kinds:
        return {"as_optional_tensors": items}
    if "as_float" in kinds:
        return {"as_sym_floats": [item.get("as_sym_int", item) for item in items]}
    if kinds <= {"as_bool"} and kinds:
        return {"as_bools": [item["as_bool"] for item in items]}
    return {"as_sym_ints": [item.get("as_sym_int", item) for item in items]}


def _item(value: Item) -> dict[str, Any]:
    match value:
        case None:
            return {"as_none": True}
        case bool():
            return {"as_bool": value}
        case int():
            return {"as_int": value}
        case float():
            return {"as_float": "NaN" if math.isnan(value) else _FLOATS.get(value, value)}
        case str():
            return {"as_string": value}
        case TensorRef(name):
            return {"as_tensor": {"name": name}}
        case NumberRef(name):
            return {"as_sym_int": {"as_name": name}}
        case DType(code):
            return {"as_scalar_type": code}
        case MemoryFormat(code):
            return {"as_memory_format": code}
        case OwnDevice():
            return {"as_device": {"type": "cpu", "index": None}}
