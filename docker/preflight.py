"""Looks, before anything slow, whether a container can load and serve the models that it was started with.

Prints nothing. Where something is missing: one line on stderr that says what was found, what is needed and
what to change, and exit code 1. Never imports torch, which takes seconds.
"""

import os
import resource
import sys
from pathlib import Path

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.errors import LoaderError
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment.header import TABLE_ALIGNMENT_BYTES, Header
from tableside.loader.segment.layout import lay_out, plan_tables
from tableside.loader.segment.memory import available_bytes
from tableside.loader.segment.stored import StoredTable
from tableside.loader.versions.versions import DEFAULT_ROOT, Model
from tableside.quant import QuantError
from tableside.serving.cli.output import described

MIB = 1 << 20


class Problem(Exception):
    """What keeps the container from serving, in one line."""


def main(arguments: list[str]) -> int:
    """Checks everything; the cheapest and clearest first."""
    root = Path(os.environ.get("TABLESIDE_ROOT", DEFAULT_ROOT))
    try:
        models = named(arguments)
        specs = [read(Path(m)) for m in models if is_path(m)]
        published = [Model(root, m) for m in models if not is_path(m)]
        mapped_bytes = sum(published_bytes(model) for model in published)
        for spec in specs:
            check_writable(root / spec.name)
        loaded_bytes = sum(segment_bytes(spec) for spec in specs)
        check_space(root, loaded_bytes)
        check_memlock(mapped_bytes + loaded_bytes)
    except (Problem, LoaderError, QuantError, OSError) as error:
        print("tableside:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def is_path(model: str) -> bool:
    """Whether an argument is the path of a model.toml or a checkpoint: a model's name holds neither
    character."""
    return "." in model or "/" in model


def named(arguments: list[str]) -> list[str]:
    """The models among the arguments."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    models, options = arguments[:end], arguments[end + 1 :]
    if option := next((m for m in models if m.startswith("-")), None):
        raise Problem(f"found option {option} among the models; expected options last: MODEL... -- {option}")
    if not models and not serves_all(options):
        raise Problem(
            "no model is named; expected the path of a model.toml or a checkpoint, or a published model's "
            "name: "
            "docker run -v FOLDER:/models:ro IMAGE /models/model.toml"
        )
    if any(o.split("=")[0] == "--root" for o in options):
        raise Problem("found --root, which the load would not see; set TABLESIDE_ROOT instead: docker run -e")
    return models


def serves_all(options: list[str]) -> bool:
    """Whether the server is to follow the root, whatever is published there."""
    return "--all" in options or os.environ.get("TABLESIDE_ALL", "").lower() in ("1", "true", "yes", "on")


def read(path: Path) -> ModelSpec:
    """The model at `path`, whose checkpoint is there."""
    _, spec = described(present(path, "model"))
    present(spec.checkpoint, "checkpoint")
    return spec


def present(path: Path, what: str) -> Path:
    """Returns `path`, or raises Problem where it cannot be read."""
    if os.access(path, os.R_OK):
        return path
    found = "is not readable" if os.path.exists(path) else "does not exist"
    raise Problem(
        f"{what} {path} {found} for user {os.getuid()} in the container; correct the path, "
        f"or mount its folder, open to that user: docker run -v FOLDER:{path.absolute().parent}:ro"
    )


def published_bytes(model: Model) -> int:
    """Bytes of a model's live version."""
    try:
        return model.attach(verify="header").size
    except LoaderError as error:
        raise Problem(f"{error}, or share the memory where it is published: docker run --ipc=host") from error


def segment_bytes(spec: ModelSpec) -> int:
    """Upper bound of the bytes that a load of `spec` takes in shared memory, from its tables' shapes."""
    with open_checkpoint(spec.checkpoint) as checkpoint:
        matrices = [checkpoint.matrix(t.key) for t in spec.tables]
    tables = plan_tables(
        StoredTable(m.rows, t.row_format.row_bytes(m.dim), 0, 1, 0, t.name, t.key, t.row_format.label, m.dim)
        for t, m in zip(spec.tables, matrices, strict=True)
    )
    header = Header(spec.name, 1, "", tables, spec.features)
    laid_out = lay_out(header, b"", TABLE_ALIGNMENT_BYTES, has_files=True).bytes
    return laid_out + len(tables) * 8192 + MIB  # default rows, and what the header says of the checkpoint


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(p for p in (path, *path.absolute().parents) if os.path.exists(p))


def check_writable(folder: Path) -> None:
    """Problem where a model cannot be published in `folder`."""
    if not os.access(found := existing(folder), os.W_OK | os.X_OK):
        raise Problem(
            f"{found} is not writable by user {os.getuid()}; a load writes to {folder}: "
            f"give that user the folder (chown {os.getuid()}), or set TABLESIDE_ROOT to another one in "
            "/dev/shm"
        )


def check_space(root: Path, needed_bytes: int) -> None:
    """Problem where the file system of `root` cannot hold that much more. Containers get 64 MiB by
    default."""
    folder = existing(root)
    free_bytes = available_bytes(folder)
    if needed_bytes > free_bytes:
        stats = os.statvfs(folder)
        used_bytes = stats.f_blocks * stats.f_frsize - free_bytes
        step_bytes = 64 * MIB
        size_mib = -(-(used_bytes + needed_bytes) // step_bytes) * step_bytes // MIB
        raise Problem(
            f"{folder} has {free_bytes:,} bytes free, the load needs {needed_bytes:,}; start the container "
            "with more "
            f"shared memory, a limit that reserves nothing: docker run --shm-size={size_mib}m"
        )


def check_memlock(needed_bytes: int) -> None:
    """Problem where a GPU is asked for and the models cannot be registered with it, which locks their
    pages."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not gpu_wanted() or limit_bytes == resource.RLIM_INFINITY or needed_bytes <= limit_bytes:
        return
    raise Problem(
        f"the memlock limit is {limit_bytes:,} bytes, registering the models with the GPU needs "
        f"{needed_bytes:,}; "
        "start the container without that limit: docker run --ulimit memlock=-1"
    )


def gpu_wanted() -> bool:
    """Whether the environment gives the server a GPU. The image built for CPUs (TABLESIDE_IMAGE) never
    uses one."""
    if os.environ.get("TABLESIDE_IMAGE") == "cpu":
        return False
    visible = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    return bool(os.environ.get("TABLESIDE_DEVICES")) or visible not in ("", "void", "none")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
