"""Commands that take a published version apart: a table becomes a file, a model the models of several owners."""

import argparse
from pathlib import Path

from rich.table import Table

from tableside.loader.export import export as export_tensor
from tableside.loader.reshard import Holding, ReshardSettings
from tableside.loader.reshard import reshard as reshard_model
from tableside.loader.states import check_bare
from tableside.loader.versions import Model
from tableside.serving.cli.models import check_no_path, published, root_settings
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
    console.print(f"wrote {written.path}: {written.rows:,} rows of dim {written.dim} in {options.format}, {mb(written.bytes)}")
    return 0


def reshard(options: argparse.Namespace) -> int:
    """Publishes a model's owners; prints what each had and has."""
    check_no_path(options.model)
    roots = root_settings(options)
    settings = ReshardSettings(options.from_owners, options.version, not options.no_activate, options.group, roots.owner)
    done = reshard_model(roots.root, options.model, options.owners, settings)
    table = Table("", "model", "version", "rows", "ids", "bytes", box=None)
    for when, holdings in (("before", done.before), ("after", done.after)):
        for holding in holdings:
            table.add_row(when, *_cells(holding))
        if len(holdings) > 1:
            totals = (sum(h.rows for h in holdings), sum(h.ids for h in holdings), sum(h.bytes for h in holdings))
            table.add_row(when, "together", "", f"{totals[0]:,}", f"{totals[1]:,}", mb(totals[2]))
    console.print(table)
    if not options.no_activate:
        for holding in done.after:
            for path in Model(roots.root, holding.model, roots.owner).collect(options.keep):
                console.print(f"removed {path}")
    return 0


def _cells(holding: Holding) -> tuple[str, ...]:
    return holding.model, str(holding.version), f"{holding.rows:,}", f"{holding.ids:,}", mb(holding.bytes)
