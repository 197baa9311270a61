"""The command `completion`: a script with which a shell completes commands, options, choices, published
models and files.

    source <(tableside completion bash)                                             in ~/.bashrc
    source <(tableside completion zsh)                                              in ~/.zshrc, after compinit
    tableside completion fish > ~/.config/fish/completions/tableside.fish

The script is made of the parser. A shell that completes runs nothing of tableside: models are the folders of
the root.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from tableside.serving.cli.parser import Parser

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
    """The script for one of SHELLS."""
    commands = parser.commands()
    lines = _fish(commands) if shell == "fish" else _bash(commands)
    if shell == "zsh":
        lines = ["autoload -Uz bashcompinit && bashcompinit", *lines]
    return "\n".join(lines) + "\n"


def _bash(commands: dict[str, Parser]) -> list[str]:
    """zsh takes it too, by bashcompinit."""
    options, choices, models = [], [], []
    for name, parser in commands.items():
        options.append(f"    {name}) words={quote(' '.join(parser.option_names()))} ;;")
        if _takes_models(parser):
            models.append(name)
        choices += [
            f"    {name}:{option}) words={quote(' '.join(words))} ;;" for option, words in _choices(parser)
        ]
    return [
        *_MODELS,
        "_tableside() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words=""',
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W {quote(" ".join(commands))} -- "$word"))',
        "    return",
        "  fi",
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
    lines = ["complete -c tableside -e"]
    for name, parser in commands.items():
        lines.append(
            f"complete -c tableside -n __fish_use_subcommand -f -a {name} -d "
            f"{_fish_quoted(parser.description or '')}"
        )
        here = f"complete -c tableside -n '__fish_seen_subcommand_from {name}'"
        for action in parser.options():
            long = next((o for o in action.option_strings if o.startswith("--")), "")
            choices = (
                f" -x -a {_fish_quoted(' '.join(map(str, action.choices)))}" if action.choices else " -r"
            )
            lines.append(f"{here} -l {long.removeprefix('--')}{'' if action.nargs == 0 else choices}")
        for before, words in _choices(parser):
            if before == name:
                lines.append(f"{here} -f -a {_fish_quoted(' '.join(words))}")
        if _takes_models(parser):
            lines.append(f"{here} -a '(__tableside_models)'")
    return [*_FISH_MODELS, *lines]


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
    """What stands before an option's value, or before the first argument, and the choices for it."""
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
