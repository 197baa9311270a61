"""Options that several commands have, and how a command is added."""

import argparse
from collections.abc import Callable

from tableside.loader.versions.retention import DEFAULT as RETENTION
from tableside.serving.cli.arguments import count, retention

AddCommand = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
KEEP = count(0, "0 keeps the live version alone")


def add_json(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true", help="print JSON, whose keys docs/operations.md lists")


def add_keep_states(p: argparse.ArgumentParser) -> None:
    told = "states beside the live one that stay, so that one can go back to them: how many, or for how long, as 1h"
    told += f" (default: {RETENTION.states})"
    p.add_argument("--keep-states", type=retention, default=RETENTION, metavar="N|AGE", help=told)
