"""The embedding calls of an exported program (.pt2): weights, modules, pooling. Read as data.

Only the graph's JSON is read; nothing runs. torch.export writes these calls for torch's and TorchRec's
modules:

    aten.embedding                                         torch.nn.Embedding
    aten.embedding_bag, _embedding_bag, ..._forward_only   torch.nn.EmbeddingBag, mode 0: sum, 1: mean, 2: max
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tableside.loader.errors import ModelError
from tableside.loader.files import open_regular
from tableside.loader.program.read import LARGEST_GRAPH_BYTES, MALFORMED

_MODEL = "models/model.json"
_EMBEDDING = ("torch.ops.aten.embedding.default",)
_BAGS = (
    "torch.ops.aten.embedding_bag.padding_idx",
    "torch.ops.aten.embedding_bag.default",
    "torch.ops.aten._embedding_bag.default",
    "torch.ops.aten._embedding_bag_forward_only.default",
)
_MODES = ("sum", "mean")
_CLASSES = ("torch.nn.modules.sparse.EmbeddingBag", "torch.nn.modules.sparse.Embedding")


class EmbeddingCall(NamedTuple):
    """One module's calls. path: of the module; key: of its weight [rows, dim]; pooling: sum, mean or none."""

    path: str
    key: str
    rows: int
    dim: int
    pooling: str


def embedding_calls(path: Path) -> list[EmbeddingCall]:
    """Returns a program's embedding calls, once per module and pooling, in graph order. ModelError: no
    exported program, no such call, or an unsupported pooling."""
    with open(open_regular(path, "the exported program", ModelError), "rb") as file:
        try:
            module = _graph_module(path, file)
            found = list(dict.fromkeys(_calls(path, module)))
        except zipfile.BadZipFile as error:
            raise ModelError(
                f"{path}: not a zip archive, so no exported program; expected a file of torch.export.save"
            ) from error
        except MALFORMED as error:
            raise ModelError(
                f"{path}: no exported program that this release understands ({type(error).__name__}: "
                f"{str(error)[:200]}); "
                "export it with torch 2.9 or later, or give TorchRec's configurations as JSON"
            ) from error
    if not found:
        raise ModelError(
            f"{path}: the program calls neither aten.embedding nor aten.embedding_bag; export the module "
            "that holds the embeddings, before it is quantized, or give TorchRec's configurations as JSON"
        )
    return found


def _graph_module(path: Path, file: Any) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        entries = [
            i for i in archive.infolist() if i.filename == _MODEL or i.filename.partition("/")[2] == _MODEL
        ]
        if len(entries) != 1:
            raise ModelError(
                f"{path}: it has {len(entries)} entries {_MODEL}; expected one, as torch.export.save writes "
                "it"
            )
        if entries[0].file_size > LARGEST_GRAPH_BYTES:
            raise ModelError(
                f"{path}: {_MODEL} takes more than {LARGEST_GRAPH_BYTES:,} bytes, the most that is read"
            )
        module: dict[str, Any] = json.loads(archive.read(entries[0]))["graph_module"]
    return module


def _calls(path: Path, module: Mapping[str, Any]) -> Iterator[EmbeddingCall]:
    graph = module["graph"]
    keys = {}
    for spec in module["signature"]["input_specs"]:
        ((kind, what),) = spec.items()
        if kind in ("parameter", "buffer"):
            keys[what["arg"]["name"]] = str(what[f"{kind}_name"])
    for node in graph["nodes"]:
        if node["target"] not in _EMBEDDING + _BAGS:
            continue
        arguments = {a["name"]: a["arg"] for a in node["inputs"]}
        weight = arguments["weight"]["as_tensor"]["name"]
        if weight not in keys:
            raise ModelError(
                f"{path}: an embedding reads {weight!r:.100}, which is computed; expected a parameter or a "
                "buffer"
            )
        key = keys[weight]
        rows, dim = (int(size["as_int"]) for size in graph["tensor_values"][weight]["sizes"])
        pooling = "none" if node["target"] in _EMBEDDING else _pooling(path, key, arguments)
        yield EmbeddingCall(_module_of(node, key), key, rows, dim, pooling)


def _pooling(path: Path, key: str, arguments: Mapping[str, Any]) -> str:
    mode = arguments["mode"]["as_int"] if "mode" in arguments else 0
    padding = arguments.get("padding_idx", {}).get("as_int", -1)
    if mode not in range(len(_MODES)):
        raise ModelError(
            f"{path}: the bags of {key} are pooled by mode {mode} (max), which is not served; expected sum "
            "or mean"
        )
    if padding >= 0:
        raise ModelError(
            f"{path}: padding_idx {padding} of {key} leaves ids out of bags, which is not served; leave them "
            "out of the input, and export the module without it"
        )
    return _MODES[mode]


def _module_of(node: Mapping[str, Any], key: str) -> str:
    """Returns the path of the calling torch module from the graph ("key,path,class;..."), else of its
    weight."""
    _, _, innermost = node["metadata"].get("nn_module_stack", "").rpartition(";")
    path, _, name = innermost.partition(",")[2].rpartition(",")
    return path if path and name in _CLASSES else key.removesuffix(".weight")
