"""`tableside cluster plan`, `cluster status` and `cluster turn`."""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tableside.loader.deltas.compact import compact
from tableside.loader.errors import ModelError
from tableside.loader.load.owner_map import HostRoom, OwnerMap, propose
from tableside.loader.load.sizes import SizedModel, sized_checkpoint, sized_version
from tableside.loader.model.model import read_model
from tableside.loader.model.tiers import TIER, owner_name, parse_tier
from tableside.loader.segment.header import Change
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.serving.cli.arguments import KEEP, AddCommand, add_cluster_token, add_json, count, size
from tableside.serving.cli.output import (
    console,
    is_path,
    mb,
    print_json,
    progress_bar,
    published,
    root_settings,
    table_of,
    token_of,
)
from tableside.serving.cluster.agreed import At, owners_of, states_of
from tableside.serving.cluster.calls import close_hosts, hosts_of
from tableside.serving.cluster.describe import Owners, turned_tables
from tableside.serving.cluster.known import KnownState, KnownStates, line_of
from tableside.serving.errors import ServingError

_STATES_S = 2.0  # that hosts may take to say which states they have
_OWNER_PORT, _SERVER_PORT = 8000, 8080


# ---- plan ----


def plan(options: argparse.Namespace) -> int:
    """Prints which tables to cut for hosts with so much memory, and what each host gets then."""
    model = _sized(options)
    room = HostRoom(options.hosts, options.memory, options.keep + 2, options.replicas)
    found = propose(model, room)
    if options.json:
        print_json(_figures(model, found, room))
    else:
        _print(model, found, room, options)
    return 0


def _sized(options: argparse.Namespace) -> SizedModel:
    if not is_path(options.model):
        return sized_version(published(options))
    spec = read_model(Path(options.model))
    with progress_bar(spec.name) as progress:
        return sized_checkpoint(spec, Model(root_settings(options).root, spec.name), progress)


def _figures(model: SizedModel, found: OwnerMap, room: HostRoom) -> dict[str, Any]:
    name, owners = model.header.model, len(found.hosts)
    cut = {t.name for t in found.tables}
    of_host = {host: owner for owner, hosts in enumerate(found.hosts) for host in hosts}
    return {
        "model": name,
        "versions": room.versions,
        "owners": owners,
        "tier": _tier(found) if owners else None,
        "counted": found.is_counted,
        "tables": [
            {
                "name": t.name,
                "rows": t.cut(0, 1).rows,
                "bytes": t.cut(0, 1).bytes,
                "is_cut": t.name in cut,
            }
            for t in sorted(model.tables, key=lambda t: -t.cut(0, 1).bytes)
        ],
        "hosts": [
            {
                "host": f"host{host}",
                "owner": owner_name(name, of_host[host], owners) if owners else None,
                "share_bytes": found.share_bytes[of_host[host]] if owners else 0,
                "local_bytes": found.local_bytes,
                "load_fraction": found.host_load(of_host[host]) if owners else 1 / room.hosts,
            }
            for host in range(room.hosts)
        ],
    }


def _tier(found: OwnerMap) -> str:
    places = ("|".join(f"host{host}:{_OWNER_PORT}" for host in hosts) for hosts in found.hosts)
    return TIER + ",".join(places)


def _print(model: SizedModel, found: OwnerMap, room: HostRoom, options: argparse.Namespace) -> None:
    told = _figures(model, found, room)
    rows = (
        (t["name"], f"{t['rows']:,}", mb(t["bytes"]), "a share a host" if t["is_cut"] else "on each host")
        for t in told["tables"]
    )
    console.print(table_of(("table", "rows", "bytes", "where"), rows))
    hosts = (
        (
            *(h["host"], h["owner"] or told["model"], mb(h["share_bytes"]), mb(h["local_bytes"])),
            *(mb(room.versions * (h["share_bytes"] + h["local_bytes"])), f"{h['load_fraction']:.1%}"),
        )
        for h in told["hosts"]
    )
    heads = ("host", "model", "share", "rest", f"{room.versions} versions", "rows/s")
    console.print(table_of(heads, hosts))
    if not found.hosts:
        console.print("the whole model fits each host; no table needs a tier")
        return
    basis = "as rows were counted" if found.is_counted else "by the rows there are: no uses were counted"
    console.print(f"rows/s: part of the rows that servers of the whole ask owners for, {basis}")
    for line in _lines(told["model"], found, told["tier"], options):
        console.print(line, markup=False)


def _lines(name: str, found: OwnerMap, tier: str, options: argparse.Namespace) -> Iterator[str]:
    """Yields lines of model.toml, and the commands that follow."""
    path = options.model if is_path(options.model) else "model.toml"
    token = "--cluster-token-file token"
    keep = "" if options.keep == 1 else f" --keep {options.keep}"
    yield f"\n# {path}, with your hosts' names"
    for table in found.tables:
        yield f"[tables.{table.name}]"
        yield f'tier = "{tier}"'
    for owner, hosts in enumerate(found.hosts):
        yield f"\n# on {', '.join(f'host{host}' for host in hosts)}"
        yield f"tableside load {path} --share {owner}{keep} {token}"
        model = owner_name(name, owner, len(found.hosts))
        yield f"tableside serve {model} --host 0.0.0.0 --port {_OWNER_PORT} {token}"
    yield "\n# then on each host"
    yield f"tableside load {path}{keep} {token}"
    yield f"tableside serve {name} --host 0.0.0.0 --port {_SERVER_PORT} {token}"


# ---- status ----


def status(options: argparse.Namespace) -> int:
    """Prints which hosts have the rows of a model, the newest state here that each has as well, and how far
    it lags behind the live one. Returns 1 where an owner has none."""
    model = published(options)
    segment = owned_state(model)
    found = owners_of(segment.header.owned)
    refused: dict[At, str] = {}
    kept = states_of(hosts_of(token_of(options), _STATES_S), found, refused)
    close_hosts()
    live = state_of(model.record())
    here = line_of(KnownStates(model).look(), live)
    told: list[dict[str, Any]] = []
    for owner in found:
        for at in owner.places:
            has = kept.get(at) or ()
            names = (n for n, k in enumerate(here) if k.name and str(owner.state(k.name)) in has)
            lag = _lag(model, here, next(names, None))
            told.append({**at._asdict(), "reached": at in kept or at in refused, **lag})
    has_state = {t["model"] for t in told if t["state"] is not None}
    degraded = sorted({owner.model for owner in found} - has_state)
    if options.json:
        print_json({"model": model.name, "state": str(live), "owners": told, "degraded": degraded})
    else:
        console.print(table_of(("model", "host", "newest state", "behind"), map(_status_cells, told)))
        console.print(f"{model.name} {live} is live here", markup=False)
        for one in degraded:
            console.print(f"{one}: no host has a state that is here, so its rows come late", markup=False)
        for at, answer in refused.items():
            console.print(f"{at.model}: {at.host} answered {answer}", markup=False)
    return int(bool(degraded))


def owned_state(model: Model) -> Segment:
    """Returns the live state. ServingError: no other host has rows of it."""
    segment = attach_state(model, None, "header")
    if not segment.header.owned:
        raise ServingError(
            f"all tables of model {model.name!r} are on this host, or in Redis; expected one whose "
            "model.toml names owners (tier, docs/hosts.md)"
        )
    return segment


def _lag(model: Model, here: Sequence[KnownState], at: int | None) -> dict[str, Any]:
    """Says which of the states `here`, the newest first, a host has, and since when it lacks the next one.
    at: its place there; None: it has none."""
    if at is None:
        return {"state": None, "positions": {}, "behind_states": None, "behind_s": None}
    change, next_change = _change(model, here[at]), _change(model, here[at - 1]) if at else None
    since = 0.0 if next_change is None else next_change.made_at or next_change.applied_at
    return {
        "state": str(here[at].state),
        "positions": {} if change is None else change.positions,
        "behind_states": at,
        "behind_s": max(0.0, time.time() - since) if since else 0.0,
    }


def _change(model: Model, known: KnownState) -> Change | None:
    return attach_state(model, known.state, "header").change


def _status_cells(t: dict[str, Any]) -> tuple[str, ...]:
    if t["state"] is None:
        return t["model"], t["host"], "none" if t["reached"] else "not reached", ""
    behind = f"{t['behind_states']:,} states, {t['behind_s']:.1f} s" if t["behind_states"] else ""
    return t["model"], t["host"], t["state"], behind


# ---- turn ----


def turn(options: argparse.Namespace) -> int:
    """Publishes the live state with other owners of its rows."""
    model = published(options)
    header = owned_state(model).header
    remote = turned_tables(header, options.to, token_of(options))
    with progress_bar(f"turning {options.model}") as progress:
        done = compact(model, progress=progress, remote=remote)
    assert done is not None, "there are remote tables"
    console.print(
        f"{model.name} version {done.state} is live, with rows of {len(options.to)} owners", markup=False
    )
    for path in model.collect(options.keep):
        console.print(f"removed {path}")
    return 0


def tier_in(text: str) -> Owners:
    """Owners' addresses, as model.toml has them."""
    try:
        found, redis = parse_tier(text, "error", False, "it")
    except ModelError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if redis is not None:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected {TIER}HOST:PORT,HOST:PORT with owners")
    return found


def add_commands(command: AddCommand) -> None:
    p = command("cluster plan", plan, "propose which hosts have which tables of a large model")
    p.sections["examples"] = (
        "  tableside cluster plan model.toml --hosts 8 --memory 64GiB",
        "  tableside cluster plan ads --hosts 8 --memory 64GiB   # published, with counts",
        "  tableside cluster plan model.toml --hosts 8 --memory 64GiB --replicas 2",
    )
    p.option("model", "a model.toml, or a published model")
    p.option("--hosts", "how many there are", type=count(1), required=True)
    p.option("--memory", "what models may take of each, as 64GiB", type=size, required=True, metavar="BYTES")
    p.option("--replicas", "hosts that each share has, at least", type=count(1), default=1)
    p.option("--keep", "older versions that each host keeps, as load does", type=KEEP, default=1)
    add_json(p)

    p = command("cluster status", status, "show the hosts that have rows of a model, and how far they lag")
    p.option("model")
    add_cluster_token(p)
    add_json(p)

    p = command("cluster turn", turn, "publish a server's version with other owners of its rows")
    p.option("model")
    p.option(
        "--to",
        f"those who have them, as {TIER}HOST:PORT,HOST:PORT",
        type=tier_in,
        required=True,
        metavar="OWNERS",
    )
    add_cluster_token(p)
    p.option("--keep", "older versions to keep for a rollback", type=KEEP, default=1)
