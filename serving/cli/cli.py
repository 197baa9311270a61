"""The command `tableside`: its commands, their options, and how it ends.

An error is one line on stderr and exit code 1. A wrong command line ends with 2.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from tableside.loader.errors import LoaderError
from tableside.loader.export import VALUE_FORMATS
from tableside.loader.retention import DEFAULT as RETENTION
from tableside.quant import QuantError
from tableside.serving import VERSION
from tableside.serving.cli import compiling, evaluation, publishing, servers, shards, showing, updates
from tableside.serving.cli.arguments import count, exponent, finite, rate, retention, seconds, share, size, state, url
from tableside.serving.cli.bench import FORMS
from tableside.serving.cli.completion import SHELLS
from tableside.serving.cli.completion import completion as print_completion
from tableside.serving.cli.generator import ARRIVALS
from tableside.serving.cli.parser import Parser
from tableside.serving.cli.remote import add_headers, add_server
from tableside.serving.cli.top import top as show_top
from tableside.serving.client import ClientError, FeatureError
from tableside.serving.client.address import default_url
from tableside.serving.errors import ServingError
from tableside.serving.settings import RootSettings, ServerSettings, add_options, unknown_variables

_KEEP = count(0, "0 keeps the live version alone")
_AddCommand = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def parser() -> Parser:
    """All commands and their options."""
    top = Parser(prog="tableside", description="Quantized embedding tables, held once in shared memory, served.")
    top.add_argument("--version", action="version", version=f"tableside {VERSION}")
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        p = sub.add_parser(name, help=text, description=text)
        p.set_defaults(run=run)
        if name not in ("serve", "init", "manifest", "lookup", "bench", "top", "completion"):
            add_options(p, RootSettings)
        return p

    for add in (_add_publishing, _add_updates, _add_shards, _add_serving, _add_evaluation, _add_measuring):
        add(command)
    p = command("completion", print_completion, "print a script with which a shell completes commands, options and models")
    p.add_argument("shell", choices=SHELLS, help="source <(tableside completion bash); fish: a file in its folder of completions")
    p.set_defaults(parser=parser)
    return top


def _add_publishing(command: _AddCommand) -> None:
    p = command("init", publishing.init, "write a first model.toml from what a checkpoint holds")
    p.add_argument("checkpoint", type=Path)
    p.add_argument(
        "--from-module",
        type=Path,
        metavar="FILE",
        help="tables and features as the trained module has them: an exported program (.pt2) or TorchRec's configurations (JSON)",
    )
    p.add_argument("--out", type=Path, default=Path("model.toml"), help="file to write; -: print it (default: %(default)s)")
    p.add_argument("--name", help="the model's name (default: the checkpoint's)")
    p.add_argument("--row-format", default="int8", help="int2, int4, int8, fp8, fp16 or fp32 (default: %(default)s)")
    p.add_argument("--force", action="store_true", help="replace the file where there is one")

    p = command("manifest", publishing.manifest, "write checksums of a checkpoint's rows, which every load of it then checks")
    p.add_argument("checkpoint", type=Path)
    p.add_argument("--out", type=Path, help="file to write (default: beside the checkpoint, where load finds it)")

    p = command("load", publishing.load, "quantize a checkpoint into shared memory and publish it as a new version")
    p.add_argument("model", type=Path, metavar="MODEL.TOML")
    p.add_argument("--threads", type=count(0), default=0, help="threads that quantize; 0: one a core (default: %(default)s)")
    p.add_argument(
        "--max-memory",
        type=size,
        default="64MiB",
        metavar="BYTES",
        help="most private memory for buffers, such as 256MiB (default: %(default)s)",
    )
    p.add_argument(
        "--backend",
        default="auto",
        help="what quantizes: auto, native, fbgemm, reference (default: %(default)s)",
    )
    p.add_argument(
        "--keep",
        type=_KEEP,
        default=1,
        help="older versions that stay published, for a rollback (default: %(default)s)",
    )
    p.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TABLE",
        help="a table to load, the others are those of the live version; may come again (default: all tables)",
    )
    p.add_argument("--no-activate", action="store_true", help="publish without making it the live version")
    p.add_argument("--group", help="a group that may read the model, for servers of other users (default: this user alone)")

    p = command("list", showing.list_models, "list models and versions in shared memory, or those that a running server has")
    p.add_argument("--url", type=url, nargs="?", const=default_url(), help="list what this server serves (alone: TABLESIDE_URL)")
    add_headers(p)
    _add_json(p)

    p = command("inspect", showing.inspect, "show what a version holds")
    p.add_argument("model")
    p.add_argument("version", type=state, nargs="?", metavar="VERSION[+SEQUENCE]", help="(default: the live state)")
    _add_json(p)

    p = command("verify", publishing.verify, "read every byte of the versions and compare checksums")
    p.add_argument("model", nargs="?", help="(default: all models)")
    p.add_argument("version", type=count(1), nargs="?", help="(default: all versions)")

    p = command("activate", publishing.activate, "make a published version the live one: rollback, or a staged release")
    p.add_argument("model")
    p.add_argument(
        "version", type=state, metavar="VERSION[+SEQUENCE]", help="a version with its newest changes, or those up to one"
    )

    p = command("remove", publishing.remove, "remove a version that is not live, or a whole model")
    p.add_argument("model")
    p.add_argument("version", type=count(1), nargs="?")
    p.add_argument("--all", action="store_true", help="the whole model, the live version too")

    p = command("gc", publishing.gc, "remove what killed loads left, and old versions")
    p.add_argument("model", nargs="?", help="(default: all models)")
    p.add_argument("--keep", type=_KEEP, default=1, help="versions beside the live one that stay (default: %(default)s)")
    _add_keep_states(p)

    p = command("compact", publishing.compact_model, "make the live version and the changes over it the next version")
    p.add_argument("model")
    p.add_argument("--threads", type=count(0), default=0, help="(default: one a core)")


def _add_keep_states(p: argparse.ArgumentParser) -> None:
    told = "states beside the live one that stay, so that one can go back to them: how many, or for how long, as 1h"
    told += f" (default: {RETENTION.states})"
    p.add_argument("--keep-states", type=retention, default=RETENTION, metavar="N|AGE", help=told)


def _add_updates(command: _AddCommand) -> None:
    p = command("apply", updates.apply, "change rows of the live version: insert, overwrite and delete those that a file names")
    p.add_argument("model")
    p.add_argument("file", type=Path, help="a .parquet, .npz or .jsonl file with tables, ids and vectors (docs/updates.md)")
    _add_changes(p)
    p.add_argument("--number", type=count(1), help="the sender's count: what was applied before does nothing, a gap is an error")
    p.add_argument("--source", help="the sender, where several count for themselves (default: apply)")
    p.add_argument("--first", action="store_true", help="the count begins with --number, and not with 1")
    _add_json(p)

    p = command("follow", updates.follow, "apply a stream of changes to the live version, until SIGTERM or SIGINT")
    p.add_argument("model")
    p.add_argument("source", help="a folder of files NUMBER.parquet, .npz or .jsonl, or redis://HOST:6379/0?stream=KEY")
    _add_changes(p)
    told = "seconds within which changes are visible, where applying them takes less than half of that (default: %(default)s)"
    p.add_argument("--every-s", type=seconds, default=1.0, help=told)
    p.add_argument("--rows", type=count(1), default=1_000_000, help="rows after which a batch ends, about (default: %(default)s)")
    p.add_argument(
        "--from",
        dest="start",
        default="start",
        metavar="POSITION",
        help="where to begin a stream of which nothing was applied: start, end, or behind a position (default: %(default)s)",
    )
    p.add_argument(
        "--compact-at",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="compact where changes take more than this share of the version's bytes, as 0.2; 0: never (default: %(default)s)",
    )
    told = "how far its processor time gives way to others', 0 to 19: above 0 servers' lookups come first (default: %(default)s)"
    p.add_argument("--nice", type=int, choices=range(20), default=10, metavar="N", help=told)
    told = "go on without changes that the model refuses, and write them to this file, a line of JSON each (default: end)"
    p.add_argument("--skip-bad", type=Path, metavar="FILE", help=told)
    p.add_argument("--reset", action="store_true", help="begin at --from, whatever was applied; what lies between is left out")
    p.add_argument("--name", help="what the model's state calls the stream (default: folder:PATH or redis:KEY)")
    _add_json(p)


def _add_changes(p: argparse.ArgumentParser) -> None:
    p.add_argument("--table", help="the table of all rows (default: the model's, where it has one, or what each row says)")
    p.add_argument("--threads", type=count(0), default=0, help="threads that quantize; 0: one a core (default: %(default)s)")
    _add_keep_states(p)


def _add_shards(command: _AddCommand) -> None:
    p = command("export", shards.export, "write a table as a file that other programs read, dequantized")
    p.add_argument("model")
    p.add_argument("table")
    p.add_argument("--to", type=Path, required=True, metavar="FILE", help="a .parquet, .npz or .safetensors file to write")
    p.add_argument("--version", type=count(1), help="the version (default: the live one)")
    p.add_argument("--format", choices=VALUE_FORMATS, default=VALUE_FORMATS[0], help="of the values (default: %(default)s)")
    p.add_argument("--name", help="what .npz and .safetensors call it: NAME.ids, NAME.weight (default: ids, weights)")
    p.add_argument("--force", action="store_true", help="replace the file where there is one")

    p = command("compile", compiling.compile_kernels, "compile what a model needs on a GPU, which need not be here")
    p.add_argument("model")
    p.add_argument("--version", type=count(1), help="the version (default: the live one)")
    p.add_argument("--arch", metavar="sm_90", help="the GPU's architecture (default: that of this machine's GPU)")
    p.add_argument(
        "--placement",
        choices=("auto", "hbm", "cached", "hybrid", "zero_copy"),
        default="auto",
        help="as it will be served (default: %(default)s, which takes all)",
    )
    p.add_argument("--cache-policy", choices=("lfu", "lru"), default="lfu", help="of the cache (default: %(default)s)")
    p.add_argument("--jobs", type=count(1), help="kernels compiled at once (default: one a core)")

    p = command("reshard", shards.reshard, "publish a model as models of several owners, which have a share of its ids each")
    p.add_argument("model")
    p.add_argument("--owners", type=count(1), required=True, help="how many there will be; 1: the whole model again")
    p.add_argument("--from", type=count(1), default=1, dest="from_owners", help="how many hold it now (default: %(default)s)")
    p.add_argument("--version", type=count(1), help="the version of the model (default: the live one)")
    p.add_argument("--keep", type=_KEEP, default=1, help="older versions of each owner that stay (default: %(default)s)")
    p.add_argument("--no-activate", action="store_true", help="publish without making it the live version")
    p.add_argument("--group", help="a group that may read what is published (default: this user alone)")


def _add_serving(command: _AddCommand) -> None:
    p = command("serve", servers.serve, "serve models over HTTP; those that are named by a path are loaded first")
    p.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        default=None,
        help="a published model, a model.toml, or a checkpoint; one of the latter two is loaded unless it is live as it is",
    )
    add_options(p, ServerSettings, skip=("models", "engine", "engines", "sharing"))

    p = command("lookup", servers.lookup, "look ids up on a running server and print the vectors")
    _add_server(p)
    p.add_argument(
        "features",
        nargs="+",
        metavar="FEATURE=IDS",
        help="bags separated by ';', ids by ',': clicked=1,2,3;7",
    )
    p.add_argument("--json", action="store_true", help="whole vectors as JSON")

    p = command("score", servers.score, "score rows on a running server, with the model's scorer")
    _add_server(p)
    p.add_argument("features", nargs="+", metavar="FEATURE=IDS", help="a bag a row: user=1;7")
    p.add_argument("--dense", action="append", metavar="NAME=ROWS", help="a dense tensor: context=0.5,1;0.25,2")


def _add_evaluation(command: _AddCommand) -> None:
    p = command("eval", evaluation.evaluate, "score a data set with a pool of processes, and say what the scores are worth")
    p.add_argument("model", metavar="MODEL", help="MODEL (the live version), MODEL@VERSION, or a model.toml, loaded first")
    p.add_argument("data", type=Path, help="a .parquet or .jsonl file, or a folder of them")
    p.add_argument("--out", type=Path, required=True, help="folder of the scores and the report; a stopped run goes on there")
    p.add_argument("--against", metavar="MODEL", help="the same for another version, to compare with")
    p.add_argument("--max-ne-increase", type=finite, help="exit with 3 where NE is larger by more than this")
    p.add_argument("--label", help="the label's column (default: that of [eval] in model.toml)")
    p.add_argument("--slice", metavar="COLUMN", help="figures for each value of a column, too")
    p.add_argument("--engine", choices=("local", "ray"), default="local", help="processes here, or actors of a Ray cluster")
    p.add_argument("--ray-address", help="the cluster (default: one of its own, on this machine)")
    p.add_argument(
        "--source", type=Path, action="append", metavar="MODEL.TOML", help="publishes the model where a machine has it not"
    )
    p.add_argument("--batch", type=count(1), default=4096, help="rows scored at once (default: %(default)s)")
    p.add_argument("--shard-rows", type=count(1), default=65_536, help="rows of a shard, about (default: %(default)s)")
    _add_json(p)
    p.add_argument("--stash", action="store_true", help="give the GPU's memory to the dense part while it runs (placement hbm)")
    kept = ("workers", "backend", "threads", "verify", "devices", "placement", "hbm_budget", "scorer_dtype")
    add_options(p, ServerSettings, skip=tuple(n for n in ServerSettings.model_fields if n not in kept))


def _add_measuring(command: _AddCommand) -> None:
    p = command("bench", servers.bench, "load a running server and report throughput and latencies")
    _add_server(p)
    p.add_argument("--batch", type=count(1), default=32, help="bags of each feature in a request (default: %(default)s)")
    p.add_argument("--ids", type=count(1), default=20, help="ids of a bag, on average (default: %(default)s)")
    p.add_argument("--same", action="store_true", help="as many ids in every bag; without it lengths differ in every request")
    p.add_argument(
        "--form",
        choices=(*FORMS, "both"),
        default="named",
        help="tensors for each feature, or two for all of them; both: in turns (default: %(default)s)",
    )
    p.add_argument("--concurrency", type=count(1), default=16, help="connections (default: %(default)s)")
    p.add_argument("--seconds", type=seconds, default=5.0, help="how long (default: %(default)s)")
    p.add_argument("--rate", type=rate, help="requests a second, sent when they are due; without it as fast as they are answered")
    p.add_argument(
        "--arrivals", choices=ARRIVALS, default="poisson", help="when requests are due with --rate (default: %(default)s)"
    )
    p.add_argument("--zipf", type=exponent, help="draw ids from Zipf's law with this exponent instead of uniformly")

    _add_json(p)

    p = command("top", show_top, "show what a running server does: requests, ids, hit rates of its GPU caches")
    add_server(p)
    p.add_argument("--seconds", type=seconds, default=2.0, help="between two looks (default: %(default)s)")
    p.add_argument("--once", action="store_true", help="one table, and end")
    _add_json(p)


def _add_json(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true", help="print JSON, whose keys docs/operations.md lists")


def _add_server(p: argparse.ArgumentParser) -> None:
    p.add_argument("model")
    add_server(p)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = parser().parse_args(arguments)
    if unknown := [*unknown_variables(os.environ)]:
        print(*(f"tableside: {line}" for line in unknown), sep="\n", file=sys.stderr)
        return 2
    try:
        return int(options.run(options))
    except ValidationError as error:
        for problem in error.errors():
            name = "--" + "-".join(str(part) for part in problem["loc"]).replace("_", "-")
            message = problem["msg"].removeprefix("Value error, ")
            print(f"tableside: {name}: {message} (found {problem['input']!r})", file=sys.stderr)
        return 2
    except (LoaderError, QuantError, ServingError, ClientError, FeatureError) as error:
        print(f"tableside: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tableside: {error.filename or options.command}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
