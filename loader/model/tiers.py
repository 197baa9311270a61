"""The tier of a table in model.toml: `rows://a:8000|c:8000,b:8000`, the hosts that have its rows."""

import re
from typing import Any

from tableside.loader.errors import ModelError

TIER = "rows://"
_OWNER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[1-9][0-9]{0,4}")


def parse_tier(tier: Any, missing: str, where: str) -> tuple[tuple[str, ...], ...]:
    """Returns the addresses in a tier, by owner, each with its replicas. missing: the table's policy; where:
    for people. ModelError: it names no hosts, or does not go with the policy."""
    listed = tier.removeprefix(TIER).split(",") if isinstance(tier, str) and tier.startswith(TIER) else []
    owners = tuple(tuple(one.strip() for one in owner.split("|")) for owner in listed)
    if not owners or not all(_OWNER.fullmatch(one) for owner in owners for one in owner):
        raise ModelError(
            f"{where}: tier is {tier!r}; expected {TIER}HOST:PORT,HOST:PORT with the owners in their order, "
            "replicas of one as HOST:PORT|HOST:PORT"
        )
    if missing == "mean" or missing.startswith("backfill"):
        raise ModelError(
            f"{where}: missing is {missing!r}, which needs all rows on one host; a table with a tier takes "
            "error, zero, or a vector"
        )
    return owners


def owner_name(model: str, number: int, owners: int) -> str:
    """Returns the name of an owner's model."""
    return f"{model}-owner-{number}-of-{owners}"
