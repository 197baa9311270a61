"""The tier of a table in model.toml: `rows://a:8000|c:8000,b:8000`, the hosts that have its rows, or
`redis://a:6379`, `rediss://a:6379,b:6379`, a Redis server or some nodes of a cluster, with TLS or without;
`redis+sentinel://a:26379,b:26379/NAME`, the Sentinels that know the servers of that name."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from tableside.loader.errors import ModelError

TIER = "rows://"
REDIS = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
USERNAME, PASSWORD = "TABLESIDE_REDIS_USERNAME", "TABLESIDE_REDIS_PASSWORD"
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[1-9][0-9]{0,4}")


SERVICE = re.compile(r"[A-Za-z0-9._-]*")


class RedisTier(NamedTuple):
    """A Redis server, or nodes of a cluster. addresses: HOST:PORT. service: what their Sentinels, which the
    addresses are then, call the servers; empty: there are none."""

    addresses: tuple[str, ...]
    is_tls: bool
    service: str = ""


def parse_tier(
    tier: Any, missing: str, is_raw: bool, where: str
) -> tuple[tuple[tuple[str, ...], ...], RedisTier | None]:
    """Returns the addresses in a tier, by owner, each with its replicas; or the Redis. missing: the table's
    policy; is_raw: of its ids; where: for people. ModelError: it names no hosts, or does not go with the
    table."""
    scheme, _, listed = tier.partition("://") if isinstance(tier, str) else ("", "", "")
    if scheme in REDIS and "@" in tier:
        raise ModelError(
            f"{where}: tier has a user or a password, which model.toml and versions do not keep; expected "
            f"{scheme}://HOST:PORT, and {USERNAME} and {PASSWORD} in the environment"
        )
    has_sentinels, service = scheme.endswith("+sentinel"), ""
    if has_sentinels:
        listed, _, service = listed.partition("/")
    owners = tuple(tuple(one.strip() for one in owner.split("|")) for owner in listed.split(","))
    are_hosts = all(ADDRESS.fullmatch(one) for owner in owners for one in owner)
    are_hosts &= has_sentinels == bool(service) and bool(SERVICE.fullmatch(service))
    if scheme not in ("rows", *REDIS) or not are_hosts or (scheme in REDIS and "|" in listed):
        raise ModelError(
            f"{where}: tier is {tier!r}; expected {TIER}HOST:PORT,HOST:PORT with the owners in their order, "
            "replicas of one as HOST:PORT|HOST:PORT; or redis://HOST:PORT, a Redis, of a cluster some nodes, "
            "as redis://HOST:PORT,HOST:PORT; or Sentinels, as redis+sentinel://HOST:PORT,HOST:PORT/NAME"
        )
    if not can_have_tier(missing):
        raise ModelError(
            f"{where}: missing is {missing!r}, which needs all rows on one host; a table with a tier takes "
            "error, zero, or a vector"
        )
    if scheme not in REDIS:
        return owners, None
    if is_raw:
        raise ModelError(f'{where}: raw ids have no tier in Redis; expected ids = "row", or owners ({TIER})')
    return (), RedisTier(tuple(one for (one,) in owners), scheme.startswith("rediss"), service)


def can_have_tier(missing: str) -> bool:
    """Returns whether rows of a table may lie elsewhere. missing: its policy."""
    return missing != "mean" and not missing.startswith("backfill")


def refuse_times(tables: Iterable[str]) -> None:
    """Raises ModelError for tables with ttl or max_rows, of a model over several hosts."""
    for name in tables:
        raise ModelError(
            f"[tables.{name}]: ttl and max_rows are for models on one host, since hosts would drop rows at "
            f"different times; leave them out, or load the whole model on one host, without tier = {TIER}..."
        )


def owner_name(model: str, number: int, owners: int) -> str:
    """Returns the name of an owner's model."""
    return f"{model}-owner-{number}-of-{owners}"
