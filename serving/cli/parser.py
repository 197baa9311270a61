"""argparse, with errors that say which name was probably meant."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from tableside.loader.model.nearest import did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser of commands, or of one command's options. A wrong command line ends with exit code 2."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's; what is left over is an error that names the option that is most like it."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            of_command = self.commands().get(getattr(options, "command", ""), self)
            of_command.refuse(unknown)
        return options

    def commands(self) -> dict[str, "Parser"]:
        """The parsers of its commands, by name."""
        return {name: p for action in self._subparsers_of() for name, p in action.choices.items()}

    def option_names(self) -> list[str]:
        """Its options as they are typed, "--json"."""
        return [name for action in self.options() for name in action.option_strings]

    def options(self) -> list[argparse.Action]:
        """Its options, in order."""
        return [action for action in self._actions if action.option_strings]

    def positionals(self) -> list[argparse.Action]:
        """Its arguments that are no options, in order."""
        return [action for action in self._actions if not action.option_strings]

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
