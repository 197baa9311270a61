"""Commands that take a published version apart: a table becomes a file, a model the models of several
owners."""

import argparse
from pathlib import Path

from rich.table import Table

from tableside.loader.load.export import VALUE_FORMATS
from tableside.loader.load.export import export as export_tensor
from tableside.loader.shards.reshard import Holding, ReshardSettings
from tableside.loader.shards.reshard import reshard as reshard_model
from tableside.loader.versions.states import check_bare
from tableside.loader.versions.versions import Model
from tableside.serving.cli.arguments import count
from tableside.serving.cli.commands import compiling
from tableside.serving.cli.commands.models import check_no_path, published, root_settings
from tableside.serving.cli.options import KEEP, AddCommand
from tableside.serving.cli.output import console, mb, progress_bar
from tableside.serving.errors import ServingError


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
    """Publishes a model's owners; prints what each had and has."""
    check_no_path(options.model)
    roots = root_settings(options)
    settings = ReshardSettings(
        options.from_owners, options.version, not options.no_activate, options.group, roots.owner
    )
    done = reshard_model(roots.root, options.model, options.owners, settings)
    table = Table("", "model", "version", "rows", "ids", "bytes", box=None)
    for when, holdings in (("before", done.before), ("after", done.after)):
        for holding in holdings:
            table.add_row(when, *_cells(holding))
        if len(holdings) > 1:
            totals = (
                sum(h.rows for h in holdings),
                sum(h.ids for h in holdings),
                sum(h.bytes for h in holdings),
            )
            table.add_row(when, "together", "", f"{totals[0]:,}", f"{totals[1]:,}", mb(totals[2]))
    console.print(table)
    if not options.no_activate:
        for holding in done.after:
            for path in Model(roots.root, holding.model, roots.owner).collect(options.keep):
                console.print(f"removed {path}")
    return 0


def _cells(holding: Holding) -> tuple[str, ...]:
    return holding.model, str(holding.version), f"{holding.rows:,}", f"{holding.ids:,}", mb(holding.bytes)


def add_commands(command: AddCommand) -> None:
    """Adds these commands."""
    p = command("export", export, "write a table as a file that other programs read, dequantized")
    p.add_argument("model")
    p.add_argument("table")
    p.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="FILE",
        help="a .parquet, .npz or .safetensors file to write",
    )
    p.add_argument("--version", type=count(1), help="the version (default: the live one)")
    p.add_argument(
        "--format",
        choices=VALUE_FORMATS,
        default=VALUE_FORMATS[0],
        help="of the values (default: %(default)s)",
    )
    p.add_argument(
        "--name", help="what .npz and .safetensors call it: NAME.ids, NAME.weight (default: ids, weights)"
    )
    p.add_argument("--force", action="store_true", help="replace the file where there is one")

    p = command(
        "compile", compiling.compile_kernels, "compile what a model needs on a GPU, which need not be here"
    )
    p.add_argument("model")
    p.add_argument("--version", type=count(1), help="the version (default: the live one)")
    p.add_argument(
        "--arch", metavar="sm_90", help="the GPU's architecture (default: that of this machine's GPU)"
    )
    p.add_argument(
        "--placement",
        choices=("auto", "hbm", "cached", "hybrid", "zero_copy"),
        default="auto",
        help="as it will be served (default: %(default)s, which takes all)",
    )
    p.add_argument(
        "--cache-policy", choices=("lfu", "lru"), default="lfu", help="of the cache (default: %(default)s)"
    )
    p.add_argument("--jobs", type=count(1), help="kernels compiled at once (default: one a core)")

    p = command(
        "reshard", reshard, "publish a model as models of several owners, which have a share of its ids each"
    )
    p.add_argument("model")
    p.add_argument(
        "--owners", type=count(1), required=True, help="how many there will be; 1: the whole model again"
    )
    p.add_argument(
        "--from",
        type=count(1),
        default=1,
        dest="from_owners",
        help="how many hold it now (default: %(default)s)",
    )
    p.add_argument("--version", type=count(1), help="the version of the model (default: the live one)")
    p.add_argument(
        "--keep", type=KEEP, default=1, help="older versions of each owner that stay (default: %(default)s)"
    )
    p.add_argument("--no-activate", action="store_true", help="publish without making it the live version")
    p.add_argument("--group", help="a group that may read what is published (default: this user alone)")
