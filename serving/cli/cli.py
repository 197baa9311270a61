"""The command `tableside`. An error is one line on stderr and exit code 1; a wrong command line exits with
2."""

import argparse
import os
import sys
from collections.abc import Callable

from pydantic import ValidationError

from tableside.loader.errors import LoaderError
from tableside.quant import QuantError
from tableside.serving import VERSION
from tableside.serving.cli.commands import cluster, evaluation, planning, publishing, servers, shards, updates
from tableside.serving.cli.parser import SHELLS, Parser
from tableside.serving.cli.parser import completion as print_completion
from tableside.serving.client import ClientError, FeatureError
from tableside.serving.errors import ServingError
from tableside.serving.settings import RootSettings, add_options, unknown_variables

_FIRST = ("init", "load", "serve", "lookup", "list", "inspect", "activate", "apply", "follow", "eval")
_NO_ROOT = {"serve", "init", "manifest", "lookup", "score", "bench", "top", "completion"}  # serve: its own


def parser() -> Parser:
    """All commands and their options."""
    top = Parser(
        prog="tableside", description="Quantized embedding tables, held once in shared memory, served."
    )
    top.add_argument("--version", action="version", version=f"tableside {VERSION}")
    told = "one of those below"
    below = {"": top.add_subparsers(prog=top.prog, required=True, metavar="COMMAND", help=told)}
    of_group = {"cluster": "plan and look at models over several hosts"}

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Parser:
        group, _, own = name.rpartition(" ")
        if group not in below:
            one = below[""].add_parser(group, description=of_group[group])
            below[group] = one.add_subparsers(prog=one.prog, required=True, metavar="COMMAND")
        add = below[group].add_parser  # its help lists commands that have one; `sections` lists all
        p: Parser = add(own, description=text, help=text) if group else add(own, description=text)
        p.set_defaults(run=run, command=name)
        return p

    for module in (publishing, updates, shards, cluster, servers, evaluation, planning):
        module.add_commands(command)
    servers.add_bench_and_top(command)
    p = command("completion", print_completion, "print a script that completes commands and options")
    p.option(
        "shell",
        "source <(tableside completion bash); fish: a file in its folder of completions",
        choices=SHELLS,
    )
    p.set_defaults(parser=parser)
    commands = top.commands()
    for name in commands.keys() - _NO_ROOT:
        add_options(commands[name], RootSettings, title="published models")
    others = [name for name in commands if name not in _FIRST]
    for title, names in (("commands", _FIRST), ("more commands", others)):
        top.sections[title] = [f"  {name:<15}{commands[name].description}" for name in names]
    return top


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
