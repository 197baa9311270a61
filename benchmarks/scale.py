"""64 hosts and 10 TB, from parts that other benchmarks measured: arithmetic, and no measurement.

    python benchmarks/scale.py

benchmarks/figures.py takes these lists for docs/scale.md as it takes those of a result file, so the page has
what the newest results say. Each row has what was measured, on which machine, and what follows for the hosts.
What holds the arithmetic together, and nobody measured: bytes and rows take as long for more of them as for
few, cores add up, and a request to many owners costs what one to two does for each row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from rich.pretty import pprint

from tableside.loader.load.owner_map import HostRoom, OwnerMap, propose
from tableside.loader.load.plan import stored_table
from tableside.loader.load.sizes import SizedModel, SizedTable
from tableside.loader.model.specs import TableSpec
from tableside.loader.segment.header import Header
from tableside.loader.segment.stored import StoredIds, StoredTable
from tableside.quant import RowFormat
from tableside.serving.cluster.protocol import TableIds, pack_request

HOSTS, MODEL_BYTES, CORES, GIB = 64, 10e12, 16, 1 << 30
TABLES, DIM, BAGS, IDS = 26, 64, 32, 20  # those of benchmarks/hosts.py
REQUESTS = 10_000  # a second, of all users together
MAPS = {"a share a host": (512, 1), "a share on two hosts": (1024, 2)}  # GiB of a host, hosts of each share
FP32_BYTES = 4 * DIM  # of a row in the checkpoint

Read = Callable[[str], dict[str, Any]]


def lists(read: Read) -> dict[str, list[dict[str, Any]]]:
    """The lists that tables are made of. read: returns a result file by its name."""
    model = _model()
    maps = {name: propose(model, HostRoom(HOSTS, gib * GIB, 3, n)) for name, (gib, n) in MAPS.items()}
    return {
        "maps": [_map_row(name, found, read) for name, found in maps.items()],
        "parts": _parts(read, maps["a share a host"]),
        "losses": [_loss(name, found, read) for name, found in maps.items()],
    }


def _model() -> SizedModel:
    """Tables of row numbers that take MODEL_BYTES in all, of one size."""
    spec = TableSpec("t", "t", RowFormat.INT8, row_alignment=4)
    rows = round(MODEL_BYTES / TABLES / spec.row_bytes(DIM))

    def cut(number: int, owners: int) -> StoredTable:
        first, end = rows * number // owners, rows * (number + 1) // owners
        return stored_table(spec, end - first, DIM, StoredIds(end - first, first=first))

    tables = tuple(SizedTable(f"t{n}", rows, cut) for n in range(TABLES))
    return SizedModel(tables, Header("ads", 1, "", (), ()), b"")


def _row(read: Read, file: str, /, **where: Any) -> dict[str, Any]:
    (found,) = (r for r in read(file)["rows"] if all(r.get(k) == v for k, v in where.items()))
    return dict(found)


def _machine(read: Read, file: str) -> str:
    found = read(file)["machine"]
    kind = "Xeon" if "Xeon" in found["cpu"] else "EPYC"
    return f"{found['cores']} core{'s' * (found['cores'] > 1)} of {'an' if kind == 'EPYC' else 'a'} {kind}"


def _checkpoint_bytes(share: float) -> float:
    return share * FP32_BYTES / RowFormat.INT8.row_bytes(DIM, 4)


def _load_s(read: Read, share: float, file: str) -> float:
    return _checkpoint_bytes(share) / 1e9 / float(_row(read, "load", format="int8", file=file)["load GB/s"])


def _map_row(name: str, found: OwnerMap, read: Read) -> dict[str, Any]:
    share = max(found.share_bytes)
    return {
        "map": name,
        "owners": len(found.hosts),
        "hosts of each": len(found.hosts[0]),
        "share GB": share / 1e9,
        "three versions GB": 3 * share / 1e9,
        "checkpoint GB": _checkpoint_bytes(share) / 1e9,
        "cold min": _load_s(read, share, "cold") / 60,
        "warm min": _load_s(read, share, "warm") / 60,
        "load fraction": max(map(found.host_load, range(len(found.hosts)))),
    }


def _parts(read: Read, found: OwnerMap) -> list[dict[str, Any]]:
    rows = TABLES * BAGS * IDS
    hosts, large = read("hosts"), {"ids": "uniform", "tables": TABLES}
    in_64, in_1 = (
        float(_row(read, "cpu_sizes_xeon", GiB=gib, **large)["native M rows/s"]) for gib in (64, 1)
    )
    us_a_row = 1 / hosts["owner_mrows_s"] + 1 / in_64 - 1 / in_1
    two, one = _row(read, "hosts", **{"from": "two owners"}), _row(read, "hosts", **{"from": "one host"})
    disk, hot = _row(read, "disk_rows", ids=rows)["krows_s"] / 1e3, read("disk_hot")["steady"]["hot"]
    attach = float(_row(read, "load", format="int8", file="cold")["attach GB/s"])
    asked = pack_request(TableIds(np.arange(TABLES), np.full(TABLES, BAGS * IDS), np.arange(rows)))
    sent = sum(map(len, asked)) + (HOSTS - 1) * 8 * (1 + 2 * TABLES)  # each owner is told which tables
    received = rows * RowFormat.INT8.row_bytes(DIM, 4) * hosts["bytes_ratio"]
    measured: list[tuple[str, str, float, float]] = [
        ("owner", "hosts", hosts["owner_mrows_s"], HOSTS * CORES / us_a_row),
        ("owner in large memory", "cpu_sizes_xeon", in_64 / in_1, 1 / us_a_row),
        ("owner cores", "hosts", 1 / hosts["owner_mrows_s"], REQUESTS * rows / 1e6 * us_a_row / HOSTS),
        ("verify", "load", attach, max(found.share_bytes) / 1e9 / attach),
        ("door p50", "hosts", two["p50_ms"], REQUESTS * two["p50_ms"] / 1e3),
        ("one host p50", "hosts", one["p50_ms"], REQUESTS * one["p50_ms"] / 1e3),
        ("sent", "hosts", sent / 1e3, 8 * REQUESTS * sent / HOSTS / 1e9),
        ("received", "hosts", hosts["bytes_ratio"], 8 * REQUESTS * received / HOSTS / 1e9),
        ("disk", "disk_rows", 1e3 * disk, HOSTS * disk),
        ("hot", "disk_hot", hot, HOSTS * disk / (1 - hot)),
    ]
    return [
        {"part": part, "measured": value, "on": _machine(read, file), "hosts": scaled}
        for part, file, value, scaled in measured
    ]


def _loss(name: str, found: OwnerMap, read: Read) -> dict[str, Any]:
    owners, replicas = len(found.hosts), len(found.hosts[0])
    rows, pauses = TABLES * BAGS * IDS, {p["replicas"]: p for p in read("hosts")["pauses"]}
    return {
        "map": name,
        "late rows": 1 / owners if replicas == 1 else 0.0,
        "degraded": 1 - (1 - 1 / owners) ** rows if replicas == 1 else 0.0,
        "load of others": replicas / (replicas - 1) if replicas > 1 else 1.0,
        "again min": _load_s(read, max(found.share_bytes), "cold") / 60,
        "pauses": 1 - 0.99**owners if replicas == 1 else 0.0,
        "p99 with pauses": pauses["pauses"]["p99_ms"] / pauses["alone"]["p99_ms"],
        "requests with pauses": pauses["pauses"]["asked"] / pauses["alone"]["asked"] - 1,
        "kill to ready s": max(read("large_model_cores")["kill to ready s"]),
    }


def main() -> None:
    from figures import read_result

    pprint(lists(read_result), expand_all=True)


if __name__ == "__main__":
    main()
