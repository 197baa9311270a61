"""Programs for the campaign `programs`: exported scorers that are changed at random, and random calls of
every listed operator.

A case is made of its seed and number alone. Half of the cases change the JSON of an archive in one to three
places (sizes, strides, offsets, types, operators, arguments, names, bytes); the others are calls
(`program_calls`).
"""

import copy
import random
from collections.abc import Callable
from typing import Any

from campaigns.program_archives import Archive, bases, packed, parsed
from campaigns.program_calls import INTS, TARGETS, called
from tableside.loader.program.graph import TYPES
from tableside.loader.program.operators import ARITHMETIC

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
        "as_int": rng.choice((*INTS, meta["sizes"][which]["as_int"] * 2, meta["sizes"][which]["as_int"] // 2))
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
    rng.choice(_metas(entries))["tensor_meta"]["storage_offset"] = {"as_int": rng.choice(INTS)}


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
    rng.choice(_nodes(entries))["target"] = rng.choice(TARGETS if rng.random() < 0.8 else sorted(ARITHMETIC))


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
        given["arg"] = {kind: rng.choice(INTS)}
    elif kind in ("as_ints", "as_sym_ints", "as_tensors", "as_optional_tensors") and value:
        which = rng.randrange(len(value))
        new = {"as_tensors": {"name": rng.choice(names + weights)}, "as_ints": rng.choice(INTS)}
        value[which] = new.get(
            kind, {"as_int": rng.choice(INTS)} if kind == "as_sym_ints" else {"as_none": True}
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
        ({"as_int": rng.choice(INTS)}, {"as_expr": 1})
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


def case(seed: int, number: int) -> bytes:
    """A case's archive."""
    rng = random.Random(f"{seed} {number}")
    return changed(rng) if number % 2 else called(rng)
