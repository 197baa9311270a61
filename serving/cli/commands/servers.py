"""Commands about a server: start one, ask one that runs, and load it."""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from tableside.loader.model.nearest import did_you_mean
from tableside.serving.cli.arguments import (
    AddCommand,
    add_json,
    add_server,
    client_of,
    count,
    exponent,
    rate,
    seconds,
    server_address,
)
from tableside.serving.cli.commands.bench import FORMS, MAX_BYTES, Form, Shape, make_requests
from tableside.serving.cli.commands.generator import ARRIVALS, Load, merged, run, run_at_rate
from tableside.serving.cli.commands.top import top as show_top
from tableside.serving.cli.output import (
    console,
    described,
    is_path,
    load_where_named,
    mb,
    print_json,
    table_of,
)
from tableside.serving.cli.parser import Parser
from tableside.serving.client import Client, Jagged
from tableside.serving.client.address import Address
from tableside.serving.errors import ServingError
from tableside.serving.settings import ServerSettings, add_options, given

_LATENCIES = {"p50_ms": 50, "p99_ms": 99, "p99_9_ms": 99.9}
_HEADS = ("form", "requests/s", "ids/s", "p50 ms", "p99 ms", "p99.9 ms", "failed")
_FEATURE = "expected FEATURE=IDS such as clicked=1,2,3;7"
_TURNS = 5  # of each form, where there are several


def serve(options: argparse.Namespace) -> int:
    """Loads models that are named by a path and not live; serves until a signal."""
    from tableside.serving.workers import server

    came: list[int] = []

    def end(sig: int, frame: FrameType | None) -> NoReturn:
        came.append(sig)
        raise SystemExit(128 + sig)

    def ignored(what: Any) -> None:  # Python ignores what is raised in a finalizer, and says so
        if not isinstance(what.exc_value, SystemExit):
            sys.__unraisablehook__(what)

    # Until the server takes its signals: a load ends too
    sys.unraisablehook = ignored
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    if options.models == []:
        options.models = None
    settings = ServerSettings(**given(options, ServerSettings))
    server.check(settings)  # before a load, which may take an hour
    if options.placed_by == "ray":
        return _serve_on_ray(settings, options.ray_address, came)
    named = load_where_named(settings.models, settings)
    return server.serve(settings.model_copy(update={"models": named}), came=came)


def _serve_on_ray(settings: ServerSettings, address: str | None, came: Sequence[int]) -> int:
    from tableside.serving.cluster.on_ray import owners_on_ray, token_file
    from tableside.serving.workers import server

    are_paths = all(is_path(name) or Path(name).exists() for name in settings.models)
    if len(settings.models) != 1 or settings.all or not are_paths:
        found = "--all" if settings.all else ", ".join(settings.models)
        raise ServingError(f"--engine ray serves one model; found {found}; expected a model.toml")
    _, spec = described(Path(settings.models[0]).absolute())  # actors have working folders of their own
    settings = settings.model_copy(update={"root": settings.root.absolute()})
    with owners_on_ray(spec, settings, address) as owners:
        owners.begin()
        here = {"models": (spec.name,), "cluster_token_file": token_file(owners.token)}
        return server.serve(settings.model_copy(update=here), came=came)


def lookup(options: argparse.Namespace) -> int:
    """Looks ids up on a running server and prints the vectors."""
    with client_of(options) as client:
        vectors = client.lookup(options.model, _features(options, client))
    if options.json:
        print_json({k: v.astype(np.float32) for k, v in vectors.items()})
        return 0
    for name, array in vectors.items():
        console.print(f"{name} {array.dtype} {list(array.shape)}")
        for row in array:
            shown = " ".join(f"{x: .4f}" for x in row[:8])
            console.print(f"  {shown}{' ...' if len(row) > 8 else ''}")
    return 0


def score(options: argparse.Namespace) -> int:
    """Scores rows on a running server and prints a line for each."""
    dense = dict(map(_parse_dense, options.dense or []))
    with client_of(options) as client:
        scores = client.score(options.model, _features(options, client), dense)
    if options.json:
        print_json({"scores": np.asarray(scores, np.float32)})
        return 0
    for number, row in enumerate(np.atleast_1d(scores)):
        console.print(f"{number} {' '.join(f'{x:.6f}' for x in np.atleast_1d(row))}")
    return 0


def bench(options: argparse.Namespace) -> int:
    """Loads a running server; prints throughput and latencies. Exit code 1: a request failed."""
    with client_of(options) as client:
        served = {m["name"]: m for m in client.models()}
    if (described := served.get(options.model)) is None:
        hint = did_you_mean(options.model, served)
        raise ServingError(
            f"model {options.model!r} is not served at {options.url}, which has {', '.join(served)}{hint}"
        )
    shape = Shape(options.batch, options.ids, options.same, options.zipf)
    forms = FORMS if options.form == "both" else (options.form,)
    address = server_address(options)
    common: dict[str, Any] = {"max_bytes": MAX_BYTES // len(forms), "extra_headers": address.headers}
    requests = {form: make_requests(described, address.http_url, shape, form, **common) for form in forms}
    features = len(described["features"])
    loads = [
        _measured(form, load, features, shape) for form, load in _in_turns(options, address, requests).items()
    ]
    failures = [load for load in loads if load["failed"]]
    if options.json:
        asked = {"batch": shape.batch, "ids": shape.ids, "same": shape.same, "zipf": shape.zipf}
        asked |= {"rate": options.rate, "arrivals": options.arrivals}
        asked |= {"concurrency": options.concurrency, "seconds": options.seconds}
        print_json(
            {"model": options.model, "url": options.url, "features": features, **asked, "forms": loads}
        )
    else:
        console.print(f"{options.model}: {features} features x {shape}")
        console.print(_how(options, requests))
        console.print(table_of(_HEADS, map(_cells, loads)))
        for load in failures:
            console.print(
                f"{load['form']}: {load['failed']} failed, the first of: {load['failure']}", markup=False
            )
    return 1 if failures else 0


def _cells(load: Mapping[str, Any]) -> tuple[str, ...]:
    rates = (f"{load[key]:,.0f}" for key in ("requests_per_s", "ids_per_s"))
    return load["form"], *rates, *(f"{load[key]:.2f}" for key in _LATENCIES), str(load["failed"])


def _measured(form: Form, load: Load, features: int, shape: Shape) -> dict[str, Any]:
    """Returns an entry of `forms` in the JSON (docs/commands.md)."""
    ids_per_s = load.requests_per_s * features * shape.batch * shape.ids
    counts = {"requests": load.requests, "failed": load.failed, "failure": load.failure or None}
    latencies = {key: load.percentile_ms(percent) for key, percent in _LATENCIES.items()}
    rates = {"form": form, "requests_per_s": load.requests_per_s, "ids_per_s": ids_per_s}
    return {**rates, **latencies, **counts}


def _in_turns(
    options: argparse.Namespace, address: Address, requests: Mapping[Form, Sequence[bytes]]
) -> dict[Form, Load]:
    """Loads the server for `seconds` in all, the forms in turns of a tenth of that."""
    turns = 1 if len(requests) == 1 else _TURNS
    loads: dict[Form, list[Load]] = {form: [] for form in requests}
    for turn in range(turns):
        for form, prepared in requests.items():
            common = {
                "concurrency": options.concurrency,
                "seconds": options.seconds / turns / len(requests),
                "first": sum(load.latencies_s.size for load in loads[form]),
            }
            if options.rate is None:
                load = run(address, prepared, **common)
            else:
                load = run_at_rate(
                    address, prepared, rate=options.rate, arrivals=options.arrivals, seed=turn, **common
                )
            loads[form].append(load)
    return {form: merged(found) for form, found in loads.items()}


def _how(options: argparse.Namespace, requests: Mapping[Form, Sequence[bytes]]) -> str:
    prepared = [
        f"{len(p)} different {form} requests of {mb(sum(map(len, p)))}" for form, p in requests.items()
    ]
    when = "" if options.rate is None else f", {options.rate:g} requests/s due at {options.arrivals} times"
    return f"{', '.join(prepared)}, {options.concurrency} connections, {options.seconds:g} s{when}"


def _features(options: argparse.Namespace, client: Client) -> dict[str, Jagged]:
    """Returns the features of a command; ids are strings where the model has such."""
    given: dict[str, list[list[Any]]] = {}
    for text in options.features:
        name, equals, ids = text.partition("=")
        if not (name and equals):
            raise ServingError(f"{text!r}: {_FEATURE}")
        if name in given:
            raise ServingError(f"feature {name!r} is given twice; separate its bags by ';'")
        given[name] = [[i for i in bag.split(",") if i.strip()] for bag in ids.split(";")]
    kinds = {t["name"]: t["datatype"] for t in client.metadata(options.model)["inputs"]}
    for name, bags in given.items():
        try:
            given[name] = bags if kinds.get(name) == "BYTES" else [[*map(int, bag)] for bag in bags]
        except ValueError as error:
            raise ServingError(f"{name}: {error}; {_FEATURE}") from None
    return {n: Jagged([i for bag in bags for i in bag], [*map(len, bags)]) for n, bags in given.items()}


def _parse_dense(text: str) -> tuple[str, list[list[float]]]:
    name, equals, rows = text.partition("=")
    try:
        parsed = [[float(x) for x in row.split(",") if x.strip()] for row in rows.split(";")]
    except ValueError:
        parsed = []
    if not (name and equals and parsed and len({len(row) for row in parsed}) == 1):
        raise ServingError(f"{text!r}: expected NAME=ROWS such as context=0.5,1;0.25,2, every row as long")
    return name, parsed


def add_commands(command: AddCommand) -> None:
    p = command("serve", serve, "serve models over HTTP; those named by a path are loaded first")
    p.sections["examples"] = (
        "  tableside serve ads --workers 4               # a published model",
        "  tableside serve checkpoint.safetensors        # loads it first, as int8",
        "  tableside serve --all --devices 0 --port 80   # all models, on a GPU",
    )
    p.option(
        "models",
        "a published model, or a model.toml or checkpoint, loaded unless it is live",
        nargs="*",
        metavar="MODEL",
        default=None,
    )
    add_options(p, ServerSettings, skip=("models", "engine", "engines", "sharing"))
    with p.group("owners of rows (docs/hosts.md)"):
        p.option(
            "--engine", "who places the owners of a model.toml's tiers", choices=("ray",), dest="placed_by"
        )
        p.option("--ray-address", "the cluster (default: that of this node)")

    p = command("lookup", lookup, "look ids up on a running server and print the vectors")
    _add_server(p)
    p.option(
        "features", "bags separated by ';', ids by ',': clicked=1,2,3;7", nargs="+", metavar="FEATURE=IDS"
    )
    p.option("--json", "whole vectors as JSON", action="store_true")

    p = command("score", score, "score rows on a running server, with the model's scorer")
    _add_server(p)
    p.option("features", "a bag a row: user=1;7", nargs="+", metavar="FEATURE=IDS")
    p.option("--dense", "a dense tensor: context=0.5,1;0.25,2", action="append", metavar="NAME=ROWS")
    add_json(p)


def add_bench_and_top(command: AddCommand) -> None:
    p = command("bench", bench, "load a running server and report throughput and latencies")
    _add_server(p)
    p.option("--batch", "bags per feature in a request", type=count(1), default=32)
    p.option("--ids", "ids of a bag, on average", type=count(1), default=20)
    p.option(
        "--form",
        "two tensors per feature, two in all, or both in turns (default: named)",
        choices=(*FORMS, "both"),
        default="named",
    )
    p.option("--concurrency", "connections", type=count(1), default=16)
    p.option("--seconds", "how long", type=seconds, default=5.0)
    p.option("--rate", "requests a second, sent when due; default: as fast as answered", type=rate)
    add_json(p)
    with p.group("what is drawn"):
        p.option("--same", "as many ids in every bag, not random lengths", action="store_true")
        p.option("--arrivals", "with --rate: when requests are due", choices=ARRIVALS, default="poisson")
        p.option("--zipf", "draw ids by Zipf's law with this exponent, not uniformly", type=exponent)

    p = command("top", show_top, "show the requests, ids and cache hits of a running server, live")
    add_server(p)
    p.option("--seconds", "between two looks", type=seconds, default=2.0)
    p.option("--once", "one table, and end", action="store_true")
    add_json(p)


def _add_server(p: Parser) -> None:
    p.option("model")
    add_server(p)
