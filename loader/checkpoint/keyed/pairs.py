"""Tables of raw ids as pairs of tensors in any format: ids [rows] or [rows, 1], and vectors [rows, dim].

model.toml names the ids (`id_key`), or the names without their last word match ("user.ids", "user.weight"),
or there is one of each. Both must have as many rows.

TorchRec's multi-probe zero-collision hashing (MPZCH) is such a pair: row i belongs to the id in slot i of
`_hash_zch_identities`, int64 [slots, 1]; -1 is an empty slot. Names in a state dict for table T of
ManagedCollisionEmbeddingBagCollection or ManagedCollisionEmbeddingCollection (torchrec 1.8.0,
modules/hash_mc_modules.py, HashZchManagedCollisionModule; modules/mc_embedding_modules.py, mc_modules.py):

    _managed_collision_collection._managed_collision_modules.T._hash_zch_identities
    _embedding_module.embedding_bags.T.weight        or embeddings.T.weight
"""

import re
from collections.abc import Iterator

from tableside.loader.checkpoint.keyed.flat import FlatRows
from tableside.loader.checkpoint.keyed.keyed import KeyedRows, KeyedTables
from tableside.loader.checkpoint.rows import Checkpoint, some
from tableside.loader.errors import CheckpointError

_IDENTITIES = re.compile(
    r"(?P<before>|.*\.)_managed_collision_collection\._managed_collision_modules\.(?P<table>[^.]+)\._hash_zch_identities"
)
_EMPTY_SLOT = -1
_ID_WORD = re.compile(r"(?:^|[._/-])(?:ids?|keys?)$", re.IGNORECASE)
_VALUE_WORD = re.compile(
    r"(?:^|[._/-])(?:weights?|values?|vectors?|embeddings?|emb|emb_vector)$", re.IGNORECASE
)


class Pairs(KeyedTables):
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.names = dict(_found(checkpoint))

    def open(self, key: str, id_key: str | None) -> KeyedRows:
        found, path = self._checkpoint, self._checkpoint.path
        values = found.matrix(key) if key not in self.names else found.matrices[key]
        id_key = id_key or self.names.get(key)
        if id_key is None:
            raise CheckpointError(
                f"{path}: names do not tell which tensor holds the ids of {key!r}; say it as id_key in "
                f"model.toml, one of: {some(found.ids)}"
            )
        if id_key not in found.ids:
            is_there = id_key in {*found.matrices, *found.skipped}
            why = f"{id_key!r} holds no ids" if is_there else f"there is no tensor {id_key!r}"
            raise CheckpointError(
                f"{path}: {why}; expected int64 or int32 [rows], as these: {some(found.ids)}"
            )
        empty = _EMPTY_SLOT if id_key.endswith("_hash_zch_identities") else None
        return FlatRows(found, found.ids[id_key], values, empty)


def _found(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Returns (vectors, ids) of the pairs that names imply."""
    matrices, ids = checkpoint.matrices, checkpoint.ids
    by_stem: dict[str, str] = {}
    for id_key in ids:
        if named := _IDENTITIES.fullmatch(id_key):
            for kind in ("embedding_bags", "embeddings"):
                key = f"{named['before']}_embedding_module.{kind}.{named['table']}.weight"
                if key in matrices and matrices[key].rows == ids[id_key].rows:
                    yield key, id_key
        elif _ID_WORD.search(id_key):
            by_stem[_ID_WORD.sub("", id_key)] = id_key
    alone = len(matrices) == len(ids) == 1
    for key, matrix in matrices.items():
        id_key = next(iter(ids)) if alone else by_stem.get(_VALUE_WORD.sub("", key), "")
        if id_key in ids and not _IDENTITIES.fullmatch(id_key) and ids[id_key].rows == matrix.rows:
            yield key, id_key
