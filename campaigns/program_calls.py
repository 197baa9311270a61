"""Programs that call one or two listed operators with arguments that are drawn by the types of their schema,
over weights of random shapes, types and indices."""

import random
from typing import Any

import numpy as np
import torch

from campaigns.program_archives import Archive, packed
from tableside.loader.program.graph import TYPES
from tableside.loader.program.operators import OPERATORS, aten_name

TARGETS = sorted(OPERATORS)
_MOST_VALUES = 4096  # of a weight that is drawn
INTS = (*range(-3, 10), 16, 63, 64, 65, 1000, 1 << 20, 1 << 31, -(1 << 31), (1 << 63) - 1)


def called(rng: random.Random) -> bytes:
    """One or two listed operators called with arguments of the types of their schemas; all that they give
    is in the scores."""
    entries: Archive = {}
    config: dict[str, Any] = {}
    for n in range(rng.randint(2, 5)):
        config[f"w{n}"], entries[f"data/weights/weight_{n}"] = _weight(rng, n)
    entries["data/weights/model_weights_config.json"] = {"config": config}
    pool, nodes = ["user", "item", *config], []
    for n in range(rng.randint(1, 2)):
        nodes.append(_call(rng, rng.choice(TARGETS), pool, n))
        pool += [f"r{n}"] * 3
    entries["models/model.json"] = _program([*nodes, *_tail(nodes[-1]["outputs"][0])], list(config))
    return packed(entries)


def _weight(rng: random.Random, number: int) -> tuple[dict[str, Any], bytes]:
    dtype = rng.choice((7, 7, 7, 7, 5, 5, 4, 8, 12, 6, 1))
    sizes = [rng.choice((1, 2, 3, 4, 8, 8, 64)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))]
    while (count := int(np.prod(sizes, dtype=np.int64))) > _MOST_VALUES:
        sizes.pop()
    kind = np.dtype(TYPES[dtype][0])
    low, high = (0, 2) if dtype in (1, 12) else rng.choice(((0, 2), (0, 4), (-9, 9), (-(1 << 31), 1 << 31)))
    if dtype == 6:
        low, high = -9, 9
    whole = [rng.randrange(low, high) for _ in range(count)]
    content = np.array([rng.gauss(0, 2) for _ in whole] if dtype == 7 else whole).astype(kind)
    strides = [int(np.prod(sizes[n + 1 :], dtype=np.int64)) for n in range(len(sizes))]
    if len(sizes) > 1 and rng.random() < 0.3:  # transposed
        sizes[0], sizes[1], strides[0], strides[1] = sizes[1], sizes[0], strides[1], strides[0]
    meta = {
        "dtype": dtype,
        "sizes": _as_ints(sizes),
        "strides": _as_ints(strides),
        "storage_offset": {"as_int": 0},
    }
    return {"path_name": f"weight_{number}", "use_pickle": False, "tensor_meta": meta}, content.tobytes()


def _as_ints(values: list[int]) -> list[dict[str, int]]:
    return [{"as_int": n} for n in values]


def _call(rng: random.Random, target: str, pool: list[str], number: int) -> dict[str, Any]:
    name, overload = aten_name(target)
    schema = getattr(getattr(torch.ops.aten, name), overload)._schema
    inputs = []
    for argument in schema.arguments:
        if argument.has_default_value() and rng.random() < 0.5:
            continue
        if (value := _value(rng, str(argument.real_type), argument.name, pool)) is not None:
            inputs.append({"name": argument.name, "arg": value})
    outputs = [
        _output(str(r.real_type), f"r{number}" if n == 0 else f"r{number}_{n}")
        for n, r in enumerate(schema.returns)
    ]
    return {"target": target, "inputs": inputs, "outputs": outputs}


def _output(kind: str, name: str) -> dict[str, Any]:
    if kind == "List[Tensor]":
        return {"as_tensors": [{"name": name}, {"name": f"{name}b"}]}
    return {"as_tensor": {"name": name}} if kind == "Tensor" else {"as_sym_int": {"as_name": name}}


def _value(rng: random.Random, kind: str, name: str, pool: list[str]) -> dict[str, Any] | None:
    """An argument of a schema's type."""
    if kind.startswith("Optional[") and not kind.startswith("Optional[List") and rng.random() < 0.3:
        return {"as_none": True}
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    refs = [{"name": rng.choice(pool)} for _ in range(rng.randint(1, 3))]
    small = (
        rng.choice((-2, -1, 0, 1, 2, 3))
        if "dim" in name
        else rng.choice((*range(-2, 9), *range(1, 9), *INTS))
    )
    numbers = [small if n == 0 else rng.choice((-1, 0, 1, 1, 2, 3, 8)) for n in range(rng.randint(0, 4))]
    made: dict[str, Any] = {
        "Tensor": {"as_tensor": refs[0]},
        "List[Tensor]": {"as_tensors": refs},
        "List[Optional[Tensor]]": {
            "as_optional_tensors": [rng.choice(({"as_none": True}, {"as_tensor": r})) for r in refs]
        },
        "bool": {"as_bool": rng.random() < 0.5},
        "float": {"as_float": rng.choice((0.0, 1e-5, 1.0, -2.5, "NaN", "Infinity"))},
        "number": rng.choice(({"as_int": small}, {"as_float": 0.5})),
        "Scalar": rng.choice(({"as_int": small}, {"as_float": 0.5})),
        "str": {
            "as_string": rng.choice(
                ("bi,bj->bij", "ij,jk->ik", "bi,bi->b", "tanh", "none", "floor", "trunc", "constant", "i")
            )
        },
        "ScalarType": {"as_scalar_type": rng.choice(list(TYPES))},
        "Layout": {"as_layout": 7},
        "Device": {"as_device": {"type": "cpu", "index": None}},
        "MemoryFormat": {"as_memory_format": rng.choice((1, 4))},
    }
    if kind in made:
        found: dict[str, Any] = made[kind]
        return found
    return {"as_ints": numbers} if kind.startswith("List") else {"as_int": small}


def _tail(result: dict[str, Any]) -> list[dict[str, Any]]:
    """From a call's result to scores that every element of it is in."""
    ((kind, held),) = result.items()
    if kind == "as_sym_int":
        held = {"name": "user"}
    ref = held[0] if isinstance(held, list) else held
    steps: list[tuple[str, dict[str, Any], str]] = [
        ("to.dtype", {"self": {"as_tensor": ref}, "dtype": {"as_scalar_type": 8}}, "t0"),
        ("nan_to_num.default", {"self": {"as_tensor": {"name": "t0"}}, "posinf": {"as_float": 3.0}}, "t1"),
        ("sum.default", {"self": {"as_tensor": {"name": "t1"}}}, "t2"),
        (
            "select.int",
            {"self": {"as_tensor": {"name": "user"}}, "dim": {"as_int": 1}, "index": {"as_int": 0}},
            "t3",
        ),
        (
            "add.Tensor",
            {"self": {"as_tensor": {"name": "t2"}}, "other": {"as_tensor": {"name": "t3"}}},
            "scores",
        ),
    ]
    return [
        {
            "target": f"torch.ops.aten.{target}",
            "inputs": [{"name": name, "arg": value} for name, value in arguments.items()],
            "outputs": [{"as_tensor": {"name": out}}],
        }
        for target, arguments, out in steps
    ]


def _program(nodes: list[Any], weights: list[str]) -> dict[str, Any]:
    batch = {"as_expr": {"expr_str": "s0"}}
    widths = {"user": 8, "item": 4}
    inputs: list[Any] = [{"buffer": {"arg": {"name": w}, "buffer_name": w}} for w in weights]
    inputs += [{"user_input": {"arg": {"as_tensor": {"name": name}}}} for name in widths]
    return {
        "graph_module": {
            "graph": {
                "nodes": nodes,
                "tensor_values": {
                    n: {"dtype": 7, "sizes": [batch, {"as_int": w}]} for n, w in widths.items()
                },
            },
            "signature": {
                "input_specs": inputs,
                "output_specs": [{"user_output": {"arg": {"as_tensor": {"name": "scores"}}}}],
            },
            "module_call_graph": [{"signature": {"forward_arg_names": list(widths)}}],
        },
        "range_constraints": {"s0": {"min_val": 0, "max_val": None}},
    }
