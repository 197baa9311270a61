"""What model.toml says, once it is read (loader.model.model)."""

from dataclasses import dataclass
from pathlib import Path

from tableside.loader.errors import ModelError
from tableside.loader.model.tiers import RedisTier
from tableside.quant import RowFormat
from tableside.quant.installed import has_gpu
from tableside.quant.row_format import ALIGNMENTS, GPU_ALIGNMENT
from tableside.quant.rows.ids import id_at

DEFAULT_BUCKETS = 1024


@dataclass(frozen=True)
class RawIds:
    """Raw ids of a table. key: their tensor or column; None: the format implies it. bucket_ids: ids per
    bucket of a range; None: buckets by hash. strings: the ids are those of strings. ttl_s: seconds after its
    last change for which compaction keeps a row; max_rows: rows that it keeps; None: all."""

    key: str | None = None
    duplicates: str = "error"
    buckets: int = DEFAULT_BUCKETS
    bucket_ids: int | None = None
    strings: bool = False
    ttl_s: int | None = None
    max_rows: int | None = None

    @property
    def has_times(self) -> bool:
        """Returns whether each row keeps the time of its last change."""
        return self.ttl_s is not None or self.max_rows is not None


@dataclass(frozen=True)
class MissingSpec:
    """Policy for missing ids: one of MISSING, "constant" (`vector`), or "backfill" from `version` of
    `model`."""

    policy: str = "error"
    vector: tuple[float, ...] = ()
    model: str = ""
    version: int = 0

    def __str__(self) -> str:
        return f"backfill:{self.model}@{self.version}" if self.policy == "backfill" else self.policy


@dataclass(frozen=True)
class TableSpec:
    """A table of model.toml. raw: None: ids are row numbers; dim: None: the checkpoint decides.
    row_alignment: None: 16 on a machine with a GPU, else 4. owners: the hosts that have its rows, HOST:PORT,
    each with its replicas; empty: this one, or Redis."""

    name: str
    key: str
    row_format: RowFormat
    missing: MissingSpec = MissingSpec()
    raw: RawIds | None = None
    dim: int | None = None
    row_alignment: int | None = None
    owners: tuple[tuple[str, ...], ...] = ()
    redis: RedisTier | None = None

    @property
    def id_kind(self) -> str:
        """Returns what its ids are, as model.toml says it."""
        return "row" if self.raw is None else "string" if self.raw.strings else "raw"

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` values. Rows that have room for their raw id at 16 keep it in them.
        QuantError: `dim` does not fill whole bytes."""
        is_for_gpu = has_gpu() and self.redis is None
        alignment = self.row_alignment or (GPU_ALIGNMENT if is_for_gpu else min(ALIGNMENTS))
        if self.raw is not None and id_at(self.row_format, dim) >= 0:
            alignment = GPU_ALIGNMENT
        return self.row_format.row_bytes(dim, alignment)

    def check_dim(self, found: int, where: str) -> None:
        """Raises ModelError if `found` is not `dim`. where: the holder of the vectors, for people."""
        if self.dim not in (None, found):
            raise ModelError(
                f"[tables.{self.name}]: dim is {self.dim}, and vectors of {where} have {found:,} values; "
                "a file of theirs was cut, or belongs to another model; if it is whole, set dim to its values"
            )


@dataclass(frozen=True)
class FeatureSpec:
    """A named jagged input, read from one table. pooling: sum, mean or none; output: fp32 or fp16."""

    name: str
    table: str
    pooling: str = "sum"
    output: str = "fp32"


@dataclass(frozen=True)
class ScorerSpec:
    """A scorer. program: the file, for kind "program"; inputs: inputs named unlike their feature. features:
    the two that "dot" and "cosine" compare."""

    kind: str
    program: Path | None = None
    inputs: tuple[tuple[str, str], ...] = ()
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalSpec:
    """Columns of evaluation data. columns: (feature or dense tensor, its columns), where the names differ."""

    label: str | None = None
    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """A whole model.toml, or what one owner has of it. share: number of the owner, and of all of them; None:
    it is whole. copies: NUMA nodes that get a copy each; empty: those that have a GPU; None: there
    is one copy, anywhere. disk_timeout_s: for which requests wait for rows; None: as the server says."""

    name: str
    checkpoint: Path
    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    scorer: ScorerSpec | None = None
    evaluation: EvalSpec | None = None
    copies: tuple[int, ...] | None = None
    share: tuple[int, int] | None = None
    disk_timeout_s: float | None = None
