"""Programs for the campaign `programs`: exported scorers that are changed at random, and random calls of
every listed operator.

A case is made of its seed and number alone. Half of the cases change the JSON of an archive in one to three
places (sizes, strides, offsets, types, operators, arguments, names, bytes); the others call one or two
operators with arguments that are drawn by the types of their schema, over weights of random shapes, types and
indices.
"""

import copy
import io
import json
import random
import zipfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.export import Dim, export, save

from tableside.loader.program import read_program, write_program
from tableside.loader.program.graph import TYPES
from tableside.loader.program.operators import ARITHMETIC, OPERATORS, aten_name

Archive = dict[str, Any]  # name -> bytes, or parsed JSON
_TARGETS = sorted(OPERATORS)
_MOST_VALUES = 4096  # of a weight that is drawn
_INTS = (*range(-3, 10), 16, 63, 64, 65, 1000, 1 << 20, 1 << 31, -(1 << 31), (1 << 63) - 1)
_JUNK: tuple[Any, ...] = (
    None,
    True,
    "",
    "x",
    "user",
    -1,
    0,
    1,
    2,
    7,
    64,
    1 << 31,
    1 << 62,
    0.5,
    [],
    {},
    [{}],
    {"as_int": 3},
    {"as_none": True},
)


# ---- exported scorers ----


class _Norms(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch, self.prelu = (
            torch.nn.Linear(12, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.PReLU(64),
        )
        self.layer, self.group, self.rms = (
            torch.nn.LayerNorm(64),
            torch.nn.GroupNorm(4, 64),
            torch.nn.RMSNorm(64),
        )
        self.top = torch.nn.Linear(64, 2)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        x = self.prelu(self.batch(self.linear(torch.cat([user, item], 1))))
        gates = self.top(self.rms(self.group(self.layer(torch.nn.functional.gelu(x)))))
        return torch.softmax(gates, 1)[:, 0]


class _Core(torch.nn.Module):
    """What core ATen has for norms."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch, self.layer = (
            torch.nn.Linear(12, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.LayerNorm(64),
        )
        self.prelu = torch.nn.PReLU(64)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.prelu(self.layer(self.batch(self.linear(torch.cat([user, item], 1)))))
        return x.sum(1)


class _Pairs(torch.nn.Module):
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.item, self.convolution = torch.nn.Linear(4, 8), torch.nn.Conv1d(2, 3, 3, padding=1)
        self.embedding = torch.nn.Embedding(8, 8)
        self.register_buffer("places", torch.tensor([1, 0, 2, 2]))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        both = torch.stack([user, self.item(item)], 1)
        all_ = torch.cat([both, self.convolution(both), self.embedding(user.argmax(1)).unsqueeze(1)], 1)
        rows, columns = torch.tril_indices(6, 6, -1)
        pairs = torch.bmm(all_, all_.transpose(1, 2))[:, rows, columns]
        best, where = pairs.topk(4, 1)
        taken = torch.gather(pairs, 1, where) + pairs.index_select(1, self.places) + best
        return torch.sigmoid(taken.sum(1))


class _Attention(torch.nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.cross = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        self.register_buffer("mask", torch.tensor([[True, False, True], [True, True, True]]))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        keys = self.keys(user).reshape(user.shape[0], 3, 8)
        queries = torch.nn.functional.pad(item, (2, 2)).unsqueeze(1).expand(-1, 2, -1)
        found = torch.nn.functional.scaled_dot_product_attention(queries, keys, keys, attn_mask=self.mask)
        left, right = torch.split(user * self.cross(user) + user, [3, 5], dim=1)
        return (
            found.mean((1, 2))
            + left.sum(1) * right.repeat(1, 2).amax(1)
            + torch.einsum("bi,bi->b", item, item)
        )


def exported(module: torch.nn.Module, *, is_decomposed: bool = False) -> bytes:
    """A .pt2 file of a module that takes `user` [batch, 8] and `item` [batch, 4]; is_decomposed: in core
    ATen operators."""
    out, batch = io.BytesIO(), Dim("batch")
    inputs = torch.zeros(2, 8), torch.zeros(2, 4)
    program = export(module.eval(), inputs, dynamic_shapes={"user": {0: batch}, "item": {0: batch}})
    save(program.run_decompositions() if is_decomposed else program, out)
    return out.getvalue()


@cache
def bases() -> tuple[bytes, ...]:
    """Archives to change: as torch wrote them, and as we do."""
    torch.manual_seed(0)
    found = [exported(module) for module in (_Norms(), _Pairs(), _Attention())]
    found += [exported(module, is_decomposed=True) for module in (_Core(), _Attention())]
    return (*found, *(write_program(read_program(data)) for data in found))


def parsed(data: bytes) -> Archive:
    """An archive's entries, JSON parsed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return {
        name: json.loads(content) if name.endswith(".json") else content for name, content in entries.items()
    }


def packed(entries: Archive) -> bytes:
    """The archive of entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"s/{name}", content if isinstance(content, bytes) else json.dumps(content))
    return out.getvalue()


# ---- changes ----


def _nodes(entries: Archive) -> list[Any]:
    found: list[Any] = entries["models/model.json"]["graph_module"]["graph"]["nodes"]
    return found


def _metas(entries: Archive) -> list[Any]:
    config = entries["data/weights/model_weights_config.json"]["config"]
    return list(config.values())


def _sizes(rng: random.Random, entries: Archive) -> None:
    meta = rng.choice(_metas(entries))["tensor_meta"]
    if not meta["sizes"]:
        return
    which = rng.randrange(len(meta["sizes"]))
    kind = rng.choice(("sizes", "sizes", "strides"))
    meta[kind][which] = {
        "as_int": rng.choice(
            (*_INTS, meta["sizes"][which]["as_int"] * 2, meta["sizes"][which]["as_int"] // 2)
        )
    }


def _smaller(rng: random.Random, entries: Archive) -> None:
    """A weight that truly is smaller, its bytes too: what is only found where its size is compared with
    what a call needs."""
    entry = rng.choice(_metas(entries))
    meta, path = entry["tensor_meta"], f"data/weights/{entry['path_name']}"
    if meta["sizes"]:
        full = max(1, meta["sizes"][0]["as_int"])
        meta["sizes"][0] = {"as_int": rng.choice((1, 2, rng.randint(0, full)))}
        entries[path] = entries[path][: len(entries[path]) * meta["sizes"][0]["as_int"] // full]


def _offset(rng: random.Random, entries: Archive) -> None:
    rng.choice(_metas(entries))["tensor_meta"]["storage_offset"] = {"as_int": rng.choice(_INTS)}


def _dtype(rng: random.Random, entries: Archive) -> None:
    rng.choice(_metas(entries))["tensor_meta"]["dtype"] = rng.choice((*TYPES, 9, 29))


def _swap(rng: random.Random, entries: Archive) -> None:
    one, other = rng.choice(_metas(entries)), rng.choice(_metas(entries))
    for key in rng.sample(("tensor_meta", "path_name"), rng.randint(1, 2)):
        one[key], other[key] = other[key], one[key]


def _bytes(rng: random.Random, entries: Archive) -> None:
    name = rng.choice([n for n in entries if n.startswith("data/weights/weight_")])
    content = entries[name]
    cut = rng.randrange(len(content) + 1)
    entries[name] = rng.choice((content[:cut], content + b"\1" * 8, rng.randbytes(len(content))))


def _operator(rng: random.Random, entries: Archive) -> None:
    rng.choice(_nodes(entries))["target"] = rng.choice(_TARGETS if rng.random() < 0.8 else sorted(ARITHMETIC))


def _argument(rng: random.Random, entries: Archive) -> None:
    """Another value of the same kind, or of any."""
    node = rng.choice(_nodes(entries))
    if not node["inputs"]:
        return
    given = rng.choice(node["inputs"])
    ((kind, value),) = given["arg"].items()
    names = [o["as_tensor"]["name"] for n in _nodes(entries) for o in n["outputs"] if "as_tensor" in o] + [
        "user",
        "item",
    ]
    weights = [s["arg"]["name"] for spec in _specs(entries) for s in spec.values() if "name" in s["arg"]]
    if kind == "as_tensor":
        given["arg"] = {kind: {"name": rng.choice(names + weights)}}
    elif kind == "as_int":
        given["arg"] = {kind: rng.choice(_INTS)}
    elif kind in ("as_ints", "as_sym_ints", "as_tensors", "as_optional_tensors") and value:
        which = rng.randrange(len(value))
        new = {"as_tensors": {"name": rng.choice(names + weights)}, "as_ints": rng.choice(_INTS)}
        value[which] = new.get(
            kind, {"as_int": rng.choice(_INTS)} if kind == "as_sym_ints" else {"as_none": True}
        )
    elif kind == "as_bool":
        given["arg"] = {kind: not value}
    else:
        given["arg"] = rng.choice(
            ({"as_none": True}, {"as_float": rng.choice((0.0, -1.5, "NaN", 1e308))}, {"as_int": 2})
        )


def _specs(entries: Archive) -> list[Any]:
    found: list[Any] = entries["models/model.json"]["graph_module"]["signature"]["input_specs"]
    return found


def _order(rng: random.Random, entries: Archive) -> None:
    nodes = _nodes(entries)
    a, b = rng.randrange(len(nodes)), rng.randrange(len(nodes))
    if rng.random() < 0.5:
        nodes[a], nodes[b] = nodes[b], nodes[a]
    else:
        del nodes[a]


def _width(rng: random.Random, entries: Archive) -> None:
    declared = entries["models/model.json"]["graph_module"]["graph"]["tensor_values"]
    declared[rng.choice(("user", "item"))]["sizes"][rng.randrange(2)] = rng.choice(
        ({"as_int": rng.choice(_INTS)}, {"as_expr": 1})
    )


def _anything(rng: random.Random, entries: Archive) -> None:
    """Some value of some JSON becomes another one."""
    held: Any = entries[rng.choice([n for n, content in entries.items() if not isinstance(content, bytes)])]
    while True:
        keys = list(held) if isinstance(held, dict) else list(range(len(held)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(held[key], dict | list) or not held[key] or rng.random() < 0.1:
            held[key] = copy.deepcopy(rng.choice(_JUNK))
            return
        held = held[key]


_CHANGES: tuple[Callable[[random.Random, Archive], None], ...] = (
    *(_sizes, _smaller, _smaller, _offset, _dtype, _swap, _swap, _bytes, _operator),
    *(_argument, _argument, _argument, _order, _width, _anything),
)


def changed(rng: random.Random) -> bytes:
    """An exported scorer that is changed in one to three places."""
    entries = parsed(rng.choice(bases()))
    for _ in range(rng.randint(1, 3)):
        try:
            rng.choice(_CHANGES)(rng, entries)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue  # an earlier change took what this one changes
    return packed(entries)


# ---- random calls ----


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
        nodes.append(_call(rng, rng.choice(_TARGETS), pool, n))
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
        else rng.choice((*range(-2, 9), *range(1, 9), *_INTS))
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


def case(seed: int, number: int) -> bytes:
    """A case's archive."""
    rng = random.Random(f"{seed} {number}")
    return changed(rng) if number % 2 else called(rng)
