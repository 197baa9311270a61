"""Infer requests of the V2 protocol, drawn: every form that it allows, in every spelling of JSON, over models
that are drawn as well."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from string_tables import texts

from tableside.loader.string_ids import as_bytes

KINDS = {np.dtype(np.int64): "INT64", np.dtype(np.int32): "INT32", np.dtype(np.float32): "FP32"}
KINDS[np.dtype(object)] = "BYTES"
NAMES = (
    "user",
    "item",
    "words",
    "a:b-c",
    "f0",
    "x",
    "kjt",
    "score",
    "long" * 20,
    "User",
    "id",
    "x_values",
    "2",
)
POOLINGS = ("sum", "mean", "none")


@dataclass(frozen=True)
class DrawnModel:
    """features: name → (pooling, output). dense: name → width. strings: features of string ids."""

    features: dict[str, tuple[str, str]]
    dense: dict[str, int] = field(default_factory=dict)
    strings: frozenset[str] = frozenset()

    @classmethod
    def draw(cls, rng: random.Random) -> "DrawnModel":
        names = rng.sample(NAMES, rng.randint(1, 8))
        alike = rng.random() < 0.5
        features = {
            n: (rng.choice(POOLINGS), "fp32" if alike else rng.choice(["fp32", "fp16"])) for n in names
        }
        dense: dict[str, int] = rng.choice([{}, {"context": 3}, {"context": 3, "größe": 1}])
        share = rng.choice([0, 0, 0.5, 1])
        return cls(features, dense, frozenset(n for n in names if rng.random() < share))


def sent(values: np.ndarray) -> bytes:
    """What a tensor is in a body."""
    return as_bytes([s.encode() for s in values.flat]) if values.dtype == object else values.tobytes()


class Spelling:
    """Writes a value as JSON: members in any order, any space, escapes, numbers in any notation."""

    def __init__(self, rng: random.Random, plain: bool) -> None:
        self._rng, self._plain = rng, plain

    def write(self, value: Any) -> str:
        rng = self._rng
        if isinstance(value, dict):
            members = list(value.items())
            if not self._plain:
                rng.shuffle(members)
            text = [f"{self._string(k)}{self._space()}:{self._space()}{self.write(v)}" for k, v in members]
            return "{" + self._joined(text) + "}"
        if isinstance(value, list | tuple):
            return "[" + self._joined([self.write(one) for one in value]) + "]"
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, float) and not self._plain and rng.random() < 0.5:
            return rng.choice(
                [
                    repr(value),
                    f"{value:.20e}",
                    f"{value:E}",
                    f"{value!r}0" if "e" not in repr(value) else repr(value),
                ]
            )
        return json.dumps(value)

    def _joined(self, texts: list[str]) -> str:
        return self._space() + (self._space() + "," + self._space()).join(texts) + self._space()

    def _space(self) -> str:
        if self._plain or self._rng.random() < 0.6:
            return ""
        return self._rng.choice([" ", "\n", "\t", "\r\n", "  "])

    def _string(self, value: str) -> str:
        if self._plain or self._rng.random() < 0.8:
            return json.dumps(value, ensure_ascii=self._rng.random() < 0.2)
        return '"' + "".join(self._escaped(c) for c in value) + '"'

    def _escaped(self, c: str) -> str:
        if self._rng.random() < 0.3:
            units = c.encode("utf-16-be")
            pairs = [units[k : k + 2].hex() for k in range(0, len(units), 2)]
            return "".join("\\u" + (p.upper() if self._rng.random() < 0.5 else p) for p in pairs)
        return json.dumps(c, ensure_ascii=False)[1:-1]


class DrawnRequest:
    """A request to a model: its form stays, its lengths differ at each call of `body`."""

    def __init__(self, rng: random.Random, model: DrawnModel, rows: int, plain: bool = False) -> None:
        self.rng, self.model, self.rows = rng, model, rows
        self.spelling = Spelling(rng, plain)
        self.names = rng.sample(list(model.features), rng.randint(1, len(model.features)))
        self.is_kjt = rng.random() < 0.35
        if self.is_kjt and rng.random() < 0.9:  # of one kind of ids
            strings = self.names[0] in model.strings
            self.names = [n for n in self.names if (n in model.strings) is strings]
        self.in_text = rng.random() < 0.25
        self.has_dense = bool(model.dense) and rng.random() < 0.7
        if self.has_dense and rng.random() < 0.7:
            self.names += [n for n in list(model.features)[:2] if n not in self.names]
        self.weighted = {n: rng.random() < 0.3 and model.features[n][0] != "none" for n in model.features}
        self.kjt_weights = rng.random() < 0.4 and all(model.features[n][0] != "none" for n in self.names)

    def _ids(self, rng: np.random.Generator, name: str, shape: Any) -> np.ndarray:
        if name in self.model.strings:
            drawn = rng.integers(0, self.rows, shape)
            return np.array(texts(self.rows), object)[drawn].reshape(drawn.shape)
        return rng.integers(0, self.rows, shape).astype(np.int32 if self.rng.random() < 0.3 else np.int64)

    def arrays(self) -> list[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(self.rng.getrandbits(32))
        bags = self.rng.randint(0, 5)
        found: list[tuple[str, np.ndarray]] = []
        if self.is_kjt:
            lengths = rng.integers(0, 4, (len(self.names), bags)).astype(np.int32)
            ids = self._ids(rng, self.names[0], int(lengths.sum()))
            found = [("kjt.values", ids), ("kjt.lengths", lengths)]
            if self.kjt_weights:
                found.append(("kjt.weights", rng.standard_normal(ids.size).astype(np.float32)))
        else:
            for n in self.names:
                found += self._feature(n, rng, bags)
        if self.has_dense:
            found += [
                (n, rng.standard_normal((bags, width)).astype(np.float32))
                for n, width in self.model.dense.items()
            ]
        if self.rng.random() < 0.5:
            self.rng.shuffle(found)
        return found

    def _feature(self, n: str, rng: np.random.Generator, bags: int) -> list[tuple[str, np.ndarray]]:
        if self.rng.random() < 0.4:
            ids = self._ids(rng, n, (bags, int(rng.integers(0, 3))))
            found = [(n, ids)]
        else:
            lengths = rng.integers(0, 4, bags).astype(np.int32)
            ids = self._ids(rng, n, int(lengths.sum()))
            found = [(f"{n}.values", ids)]
            if self.model.features[n][0] != "none" or self.rng.random() < 0.5:
                found.append((f"{n}.lengths", lengths))
        if self.weighted[n]:
            found.append((f"{n}.weights", rng.standard_normal(ids.size).astype(np.float32)))
        return found

    def _entry(self, name: str, values: np.ndarray) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "name": name,
            "datatype": KINDS[values.dtype],
            "shape": list(values.shape),
        }
        if not self.in_text:
            entry["parameters"] = {"binary_data_size": len(sent(values))}
            if self.rng.random() < 0.2:
                entry["parameters"]["more"] = self.rng.choice([None, [1, {"a": []}], "x", -1.5e3, {}])
            return entry
        entry["data"] = values.reshape(-1).tolist() if self.rng.random() < 0.5 else values.tolist()
        if values.dtype == np.float32:
            entry["data"] = json.loads(json.dumps(entry["data"]))
        return entry

    def _outputs(self) -> list[dict[str, Any]]:
        of = self.model.features
        names = [n for n in self.names if self.rng.random() < 0.7]
        if self.is_kjt:
            pooled = [n for n in self.names if of[n][0] != "none"]
            names = ["kjt"] if pooled else []
            names += ["kjt.sequences", "kjt.offsets"] if len(pooled) < len(self.names) else []
            names += ["kjt.found"] if self.rng.random() < 0.3 else []
        else:
            names += [f"{n}.found" for n in self.names if self.rng.random() < 0.3]
        if self.has_dense and self.rng.random() < 0.5:
            names.append("score")
        self.rng.shuffle(names)
        found = []
        for n in names:
            parameters: dict[str, Any] = {}
            if self.rng.random() < 0.7:
                parameters["binary_data"] = self.rng.random() < 0.8
            found.append({"name": n, **({"parameters": parameters} if self.rng.random() < 0.9 else {})})
        return found

    def header(self, found: list[tuple[str, np.ndarray]]) -> dict[str, Any]:
        rng = self.rng
        header: dict[str, Any] = {"inputs": [self._entry(n, a) for n, a in found]}
        parameters: dict[str, Any] = {}
        if rng.random() < 0.9:
            parameters["binary_data_output"] = rng.random() < 0.9
        if rng.random() < 0.3:
            parameters["timeout"] = rng.choice([0, 1, 2500, 2**63 - 1])
        if self.is_kjt and (self.names != list(self.model.features) or rng.random() < 0.5):
            parameters["kjt.features"] = self.names if rng.random() < 0.6 else ",".join(self.names)
        if parameters or rng.random() < 0.5:
            header["parameters"] = parameters
        if rng.random() < 0.5:
            header["id"] = rng.choice(["", "abc", "7", "größe", 'a"b', "\x01\n\t\\/\x7f", "😀", "\u2028"])
        if rng.random() < 0.5:
            header["outputs"] = self._outputs()
        if rng.random() < 0.2:
            header["unknown"] = rng.choice([None, [[], {"a": [1, 2.5e-3]}], "x\n", 0, -0.0, True])
        return header

    def body(self) -> tuple[bytes, int]:
        """A body, and the bytes of its header."""
        found = self.arrays()
        header = self.spelling.write(self.header(found)).encode()
        if self.rng.random() < 0.1:
            header += b" " * self.rng.randint(1, 9)
        binary = b"" if self.in_text else b"".join(sent(a) for _, a in found)
        return header + binary, len(header)
