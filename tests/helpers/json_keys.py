"""The keys of `--json` that docs/commands.md lists, and those that a command prints."""

import re
from pathlib import Path
from typing import Any

KEYS = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def documented_keys(command: str) -> set[str]:
    """The keys that docs/commands.md lists for a command."""
    (row,) = re.findall(rf"^\| `{command}` \| (.*) \|$", KEYS, re.MULTILINE)
    return {key for key in re.findall(r"`([^`]+)`", row) if "/" not in key}


def keys_of(found: Any) -> set[str]:
    """All keys of JSON, at every depth."""
    if isinstance(found, dict):
        return set(found).union(*map(keys_of, found.values()))
    return set().union(*map(keys_of, found)) if isinstance(found, list) else set()
