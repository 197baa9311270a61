"""argparse with a short usage and hints about misspelt names, and `tableside completion`."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

from tableside.loader.model.nearest import did_you_mean


class _Help(argparse.HelpFormatter):
    """Its usage is what has to be given; options are listed below it."""

    _SOME = argparse.Action(["OPTION ..."], "options", nargs=0)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None
    ) -> None:
        needed = [a for a in actions if a.required or not a.option_strings]
        super().add_usage(usage, [self._SOME, *needed], [], prefix)


class Parser(argparse.ArgumentParser):
    """A parser of commands, or of one command's options. A wrong command line ends with exit code 2.

    sections: lines at the end of its help, by their titles.
    """

    def __init__(self, **kind: Any) -> None:
        super().__init__(**kind, formatter_class=_Help)
        self.sections: dict[str, Sequence[str]] = {}
        self._group: argparse._ActionsContainer = self

    def format_help(self) -> str:
        """As argparse's, with the sections."""
        lines = (line for title, told in self.sections.items() for line in ("", f"{title}:", *told))
        return super().format_help() + "".join(f"{line}\n" for line in lines)

    @contextmanager
    def group(self, title: str) -> Iterator[None]:
        """Options that are added inside stand under a title of their own in the help."""
        before, self._group = self._group, self.add_argument_group(title)
        yield
        self._group = before

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's; the error for an unknown argument names the most similar option."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            of_command = self.commands().get(getattr(options, "command", ""), self)
            of_command.refuse(unknown)
        return options

    def commands(self) -> dict[str, "Parser"]:
        """The parsers of its commands, by name; of those of a group as "cluster plan"."""
        found: dict[str, Parser] = {}
        for name, p in ((n, p) for action in self._subparsers_of() for n, p in action.choices.items()):
            found |= {f"{name} {own}": one for own, one in p.commands().items()} or {name: p}
        return found

    def option_names(self) -> list[str]:
        """Its options as they are typed, "--json"."""
        return [name for action in self.options() for name in action.option_strings]

    def options(self) -> list[argparse.Action]:
        return [action for action in self._actions if action.option_strings]

    def positionals(self) -> list[argparse.Action]:
        return [action for action in self._actions if not action.option_strings]

    def option(self, name: str, told: str = "", **kind: Any) -> None:
        """Adds an option or a positional; its help tells its default."""
        if kind.get("default") not in (None, []) and "(default" not in told:
            told += " (default: %(default)s)"
        self._group.add_argument(name, help=told, **kind)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends with an error about arguments that mean nothing here."""
        first = unknown[0].partition("=")[0]
        hint = did_you_mean(first, self.option_names()) if first.startswith("-") else ""
        self.error(
            f"found {' '.join(unknown)}, which means nothing "
            f"here{hint or f'; {self.prog} --help says what does'}"
        )

    def _subparsers_of(self) -> list[Any]:
        return [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(c) for c in action.choices]
            hint = did_you_mean(str(value), choices)
            raise argparse.ArgumentError(
                action, f"found {value!r}; expected one of: {', '.join(choices)}{hint}"
            )


SHELLS = ("bash", "zsh", "fish")
_MODELS = (
    "_tableside_models() {",
    "  local model",
    '  for model in "${TABLESIDE_ROOT:-/dev/shm/tableside}"/*/; do',
    '    model="${model%/}"; [ ! -d "$model" ] || echo "${model##*/}"',
    "  done",
    "}",
)


def script(parser: Parser, shell: str) -> str:
    commands = parser.commands()
    lines = _fish(commands) if shell == "fish" else _bash(commands)
    if shell == "zsh":
        lines = ["autoload -Uz bashcompinit && bashcompinit", *lines]
    return "\n".join(lines) + "\n"


def _groups(commands: Iterable[str]) -> dict[str, list[str]]:
    """Returns the first words of commands, each with the second ones that it takes."""
    found: dict[str, list[str]] = {}
    for first, *rest in map(str.split, commands):
        found.setdefault(first, []).extend(rest)
    return found


def _bash(commands: dict[str, Parser]) -> list[str]:
    """zsh takes it too, by bashcompinit."""
    options, choices, models, groups = [], [], [], _groups(commands)
    below = {first: seconds for first, seconds in groups.items() if seconds}
    for name, parser in commands.items():
        options.append(f"    {quote(name)}) words={quote(' '.join(parser.option_names()))} ;;")
        if _takes_models(parser):
            models.append(name)
        choices += [
            f"    {quote(f'{name}:{option}')}) words={quote(' '.join(words))} ;;"
            for option, words in _choices(parser)
        ]
    return [
        *_MODELS,
        "_tableside() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '  local command="${COMP_WORDS[1]}" words=""',
        "  COMPREPLY=()",
        '  case "$COMP_CWORD:$command" in',
        f"    1:*) words={quote(' '.join(groups))} ;;",
        *(f"    2:{first}) words={quote(' '.join(seconds))} ;;" for first, seconds in below.items()),
        "  esac",
        '  if [ -n "$words" ]; then',
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "    return",
        "  fi",
        f'  case "$command" in {"|".join(below)}) command="$command ${{COMP_WORDS[2]}}" ;; esac',
        '  case "$command:$before" in',
        *choices,
        "  esac",
        '  if [ -z "$words" ]; then',
        '    case "$word" in',
        '    -*) case "$command" in',
        *options,
        "    esac ;;",
        f"    *) case {quote(' ' + ' '.join(models) + ' ')} in",
        '      *" $command "*) words="$(_tableside_models)" ;;',
        "    esac ;;",
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _tableside tableside",
    ]


def _fish(commands: dict[str, Parser]) -> list[str]:
    lines, groups = ["complete -c tableside -e"], _groups(commands)
    for name, parser in commands.items():
        first, *seconds = name.split()
        after = f"'{_fish_seen(first)}'" if seconds else "__fish_use_subcommand"
        told = _fish_quoted(parser.description or "")
        lines.append(f"complete -c tableside -n {after} -f -a {name.split()[-1]} -d {told}")
        others = [group for group, words in groups.items() if first in words]
        seen = [*map(_fish_seen, name.split()), *(f"not {_fish_seen(group)}" for group in others)]
        here = f"complete -c tableside -n '{'; and '.join(seen)}'"
        for action in parser.options():
            long = next((o for o in action.option_strings if o.startswith("--")), "")
            choices = (
                f" -x -a {_fish_quoted(' '.join(map(str, action.choices)))}" if action.choices else " -r"
            )
            lines.append(f"{here} -l {long.removeprefix('--')}{'' if action.nargs == 0 else choices}")
        for before, words in _choices(parser):
            if before == name.split()[-1]:
                lines.append(f"{here} -f -a {_fish_quoted(' '.join(words))}")
        if _takes_models(parser):
            lines.append(f"{here} -a '(__tableside_models)'")
    lines += [
        f"complete -c tableside -n __fish_use_subcommand -f -a {first}"
        for first, words in groups.items()
        if words
    ]
    return [*_FISH_MODELS, *lines]


def _fish_seen(word: str) -> str:
    return f"__fish_seen_subcommand_from {word}"


_FISH_MODELS = (
    "function __tableside_models",
    "  set -l root /dev/shm/tableside",
    "  set -q TABLESIDE_ROOT; and set root $TABLESIDE_ROOT",
    "  for model in $root/*/",
    "    basename $model",
    "  end",
    "end",
)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _takes_models(parser: Parser) -> bool:
    """Whether a command names published models; `load` calls a path so."""
    return any(a.dest in ("model", "models") and a.type is not Path for a in parser.positionals())


def _choices(parser: Parser) -> Iterator[tuple[str, list[str]]]:
    """Yields (the word before, its choices) for options and first arguments."""
    for action in parser.options():
        for option in action.option_strings if action.choices else ():
            yield option, [*map(str, action.choices or ())]
    for action in parser.positionals()[:1]:
        if action.choices:
            yield parser.prog.split()[-1], [*map(str, action.choices)]


def completion(options: argparse.Namespace) -> int:
    """Prints a shell's script."""
    print(script(options.parser(), options.shell), end="")
    return 0
