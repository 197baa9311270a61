"""Commands about a server: start one, ask one that runs, and load it."""

import argparse

import numpy as np
import orjson
from rich.table import Table

from tableside.serving import wire
from tableside.serving.cli import bench as load_generator
from tableside.serving.cli.output import console
from tableside.serving.client import Client
from tableside.serving.errors import ServingError
from tableside.serving.settings import ServerSettings, given


def serve(options: argparse.Namespace) -> int:
    """Serves until a signal ends the server."""
    from tableside.serving.server import serve as run

    if options.models == []:
        options.models = None
    return run(ServerSettings(**given(options, ServerSettings)))


def lookup(options: argparse.Namespace) -> int:
    """Looks ids up on a running server and prints the vectors."""
    features: dict[str, wire.Jagged] = {}
    for name, ids in map(_parse_feature, options.features):
        if name in features:
            raise ServingError(f"feature {name!r} is given twice; separate its bags by ';'")
        features[name] = ids
    with Client(options.url) as client:
        vectors = client.lookup(options.model, features)
    if options.json:
        print(orjson.dumps({k: v.astype(np.float32) for k, v in vectors.items()}, option=orjson.OPT_SERIALIZE_NUMPY).decode())
        return 0
    for name, array in vectors.items():
        console.print(f"{name} {array.dtype} {list(array.shape)}")
        for row in array:
            shown = " ".join(f"{x: .4f}" for x in row[:8])
            console.print(f"  {shown}{' ...' if len(row) > 8 else ''}")
    return 0


def score(options: argparse.Namespace) -> int:
    """Scores rows on a running server and prints a line for each."""
    features = dict(map(_parse_feature, options.features))
    dense = dict(map(_parse_dense, options.dense or []))
    with Client(options.url) as client:
        scores = client.score(options.model, features, dense)
    for number, row in enumerate(np.atleast_1d(scores)):
        console.print(f"{number} {' '.join(f'{x:.6f}' for x in np.atleast_1d(row))}")
    return 0


def bench(options: argparse.Namespace) -> int:
    """Loads a running server; prints throughput and latencies. Exit code 1: a request failed."""
    with Client(options.url) as client:
        described = next((m for m in client.models() if m["name"] == options.model), None)
        if described is None:
            raise ServingError(f"model {options.model!r} is not served at {options.url}")
        requests = load_generator.make_requests(described, options.url, options.batch, options.ids, options.zipf)
    load = load_generator.run(f"{options.url}/v2", requests, concurrency=options.concurrency, seconds=options.seconds)
    ids = options.batch * options.ids * len(described["features"])
    table = Table("requests/s", "ids/s", "p50 ms", "p99 ms", "p99.9 ms", "failed", box=None)
    latencies = (f"{load.percentile_ms(p):.2f}" for p in (50, 99, 99.9))
    table.add_row(f"{load.requests_per_s:,.0f}", f"{load.requests_per_s * ids:,.0f}", *latencies, str(load.failed))
    console.print(
        f"{options.model}: {len(described['features'])} features x batch {options.batch} x {options.ids} ids, "
        f"{options.concurrency} connections, {load.seconds:.1f} s"
    )
    console.print(table)
    return 1 if load.failed else 0


def _parse_feature(text: str) -> tuple[str, wire.Jagged]:
    name, equals, ids = text.partition("=")
    try:
        bags = [[int(i) for i in bag.split(",") if i.strip()] for bag in ids.split(";")]
    except ValueError:
        bags = []
    if not (name and equals and bags):
        raise ServingError(f"{text!r}: expected FEATURE=IDS such as clicked=1,2,3;7")
    return name, wire.Jagged([i for bag in bags for i in bag], [len(bag) for bag in bags])


def _parse_dense(text: str) -> tuple[str, list[list[float]]]:
    name, equals, rows = text.partition("=")
    try:
        parsed = [[float(x) for x in row.split(",") if x.strip()] for row in rows.split(";")]
    except ValueError:
        parsed = []
    if not (name and equals and parsed and len({len(row) for row in parsed}) == 1):
        raise ServingError(f"{text!r}: expected NAME=ROWS such as context=0.5,1;0.25,2, every row as long")
    return name, parsed
