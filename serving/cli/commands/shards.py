"""`tableside export`, `reshard` and `compile`."""

import argparse
import os
import re
from pathlib import Path

from rich.table import Table

from tableside.loader.load.export import VALUE_FORMATS
from tableside.loader.load.export import export as export_tensor
from tableside.loader.model.tiers import TIER
from tableside.loader.shards.moving import take_share
from tableside.loader.shards.reshard import Holding, ReshardResult, ReshardSettings
from tableside.loader.shards.reshard import reshard as reshard_model
from tableside.loader.versions.states import check_bare
from tableside.loader.versions.versions import Model
from tableside.quant.device.architecture import architectures
from tableside.quant.gpu.ahead import CompiledKernel, has_driver
from tableside.quant.gpu.residence.registry import CHOICES, is_by_cpu
from tableside.quant.installed import require
from tableside.serving.cli.arguments import KEEP, AddCommand, add_cluster_token, count
from tableside.serving.cli.commands.cluster import tier_in
from tableside.serving.cli.output import (
    check_no_path,
    console,
    mb,
    progress_bar,
    published,
    root_settings,
    table_of,
    token_of,
)
from tableside.serving.cluster.describe import Owners
from tableside.serving.cluster.sources import common_state
from tableside.serving.errors import ServingError
from tableside.serving.model.compiled_kernels import compile_once, kernels_wanted, triton_cache


def compile_kernels(options: argparse.Namespace) -> int:
    """Compiles kernels that Triton's disk cache lacks: the servers', then the PyTorch modules'."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ServingError("TRITON_INTERPRET=1 has Triton interpret kernels and compile none; unset it")
    require("tableside compile", "torch", "triton", extra="gpu")
    arch = _arch(options.arch)
    segment = published(options).attach(options.version, "header")
    compiled: dict[str, CompiledKernel] = {}
    for what, tensors in (("servers", False), ("modules", True)):
        wanted = kernels_wanted(
            segment, options.placement, is_lfu=options.cache_policy == "lfu", tensors=tensors
        )
        with progress_bar(f"sm_{arch}, {what}") as progress:
            for one in compile_once(wanted, arch, options.jobs, progress) or ():
                compiled.setdefault(one.name, one)
    where = f"for sm_{arch} in {triton_cache()}"
    if not compiled:
        console.print(f"all kernels {where} were there before")
        return 0
    rows = ((one.name, f"{one.seconds:.1f}") for one in sorted(compiled.values()))
    console.print(table_of(("kernel", "s"), rows))
    console.print(f"{len(compiled)} kernels {where}")
    if not has_driver():
        console.print(
            "CUDA's driver is not here: the code that launches kernels is compiled where they are launched "
            "first"
        )
    return 0


def _arch(given_as: str | None) -> int:
    """The number of an architecture, as 90 of sm_90; None: that of this machine's first GPU."""
    if given_as is not None:
        if (found := re.fullmatch(r"(?:sm_)?(\d{2,3})[a-z]?", given_as)) is None:
            raise ServingError(f"--arch is {given_as!r}; expected a GPU's architecture, such as sm_90")
        return int(found[1])
    if not (here := architectures()):
        raise ServingError(
            "there is no GPU here; name the architecture of the one that will serve, such as --arch sm_90"
        )
    return here[0]


def export(options: argparse.Namespace) -> int:
    """Writes a table of a version to a file."""
    to: Path = options.to
    if to.exists() and not options.force:
        raise ServingError(f"{to} exists; choose another file, or --force to replace it")
    model = published(options)
    tensor = model.tensor(options.table, options.version)
    check_bare(model, model.current() if options.version is None else options.version, "export")
    with progress_bar(options.table) as progress:
        written = export_tensor(tensor, to, options.format, progress, options.name)
    console.print(
        f"wrote {written.path}: {written.rows:,} rows of dim {written.dim} in {options.format}, "
        f"{mb(written.bytes)}"
    )
    return 0


def reshard(options: argparse.Namespace) -> int:
    """Publishes a model for several owners, or the share of one of them; prints their holdings before and
    after."""
    check_no_path(options.model)
    roots = root_settings(options)
    is_here = isinstance(options.from_owners, int)
    if is_here != (options.share is None) or not (is_here or options.version is None):
        raise ServingError(
            "--share takes one owner's rows from what is live on other hosts; expected it with --from "
            f"{TIER}HOST:PORT,... and without --version, or neither of the two"
        )
    before = options.from_owners if is_here else 0
    settings = ReshardSettings(before, options.version, not options.no_activate, options.group, roots.owner)
    if is_here:
        done = reshard_model(roots.root, options.model, options.owners, settings)
    else:
        done = _take_share(options, roots.root, settings)
    table = Table("", "model", "version", "rows", "ids", "bytes", box=None)
    for when, holdings in (("before", done.before), ("after", done.after)):
        for holding in holdings:
            table.add_row(when, *_cells(holding))
        if len(holdings) > 1:
            rows, ids, size = (sum(getattr(h, n) for h in holdings) for n in ("rows", "ids", "bytes"))
            table.add_row(when, "together", "", f"{rows:,}", f"{ids:,}", mb(size))
    console.print(table)
    if not options.no_activate:
        for holding in done.after:
            for path in Model(roots.root, holding.model, roots.owner).collect(options.keep):
                console.print(f"removed {path}")
    return 0


def _take_share(options: argparse.Namespace, root: Path, settings: ReshardSettings) -> ReshardResult:
    with (
        common_state(options.model, options.from_owners, token_of(options)) as sources,
        progress_bar(f"share {options.share} of {options.model}") as progress,
    ):
        return take_share(root, options.share, options.owners, sources, settings, progress)


def _holders(text: str) -> int | Owners:
    """How many hold a model, or where they are."""
    return tier_in(text) if TIER in text else count(1, f"or {TIER}HOST:PORT,...")(text)


def _cells(holding: Holding) -> tuple[str, ...]:
    return holding.model, str(holding.version), f"{holding.rows:,}", f"{holding.ids:,}", mb(holding.bytes)


def add_commands(command: AddCommand) -> None:
    p = command("export", export, "write a table, dequantized, as a file for other programs")
    p.option("model")
    p.option("table")
    p.option("--to", "a .parquet, .npz or .safetensors file", type=Path, required=True, metavar="FILE")
    p.option("--version", "the version (default: the live one)", type=count(1))
    p.option("--format", "of the values", choices=VALUE_FORMATS, default=VALUE_FORMATS[0])
    p.option("--name", "its name in .npz and .safetensors: NAME.ids, NAME.weight")
    p.option("--force", "replace the file where there is one", action="store_true")

    p = command("compile", compile_kernels, "compile a model's kernels for a GPU, which need not be here")
    p.option("model")
    p.option("--version", "the version (default: the live one)", type=count(1))
    p.option("--arch", "the GPU's architecture (default: that of this machine's GPU)", metavar="sm_90")
    p.option(
        "--placement",
        "as it will be served (default: auto, all)",
        choices=tuple(name for name in CHOICES if not is_by_cpu(name)),
        default="auto",
    )
    p.option("--cache-policy", "of the cache", choices=("lfu", "lru"), default="lfu")
    p.option("--jobs", "kernels compiled at once (default: one a core)", type=count(1))

    p = command("reshard", reshard, "publish a model as those of several owners, with a share each")
    p.option("model")
    p.option("--owners", "how many there will be; 1: the whole model", type=count(1), required=True)
    p.option(
        "--from",
        f"how many hold it now, here; or, on other hosts, who, as {TIER}HOST:PORT,HOST:PORT",
        type=_holders,
        default=1,
        dest="from_owners",
        metavar="N|OWNERS",
    )
    p.option(
        "--share", "publish this owner's share alone, from 0, with rows of other hosts", type=int, metavar="K"
    )
    add_cluster_token(p)
    p.option("--version", "the version of the model (default: the live one)", type=count(1))
    p.option("--keep", "older versions to keep for each owner", type=KEEP, default=1)
    p.option("--no-activate", "publish without making it the live version", action="store_true")
    p.option("--group", "a group that may read what is published (default: this user alone)")
