"""Command-line values with their ranges, and options of several commands: also those of the server that a
command asks. argparse ends with exit code 2."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from tableside.loader.errors import VersionError
from tableside.loader.model.model import parse_age
from tableside.loader.versions.retention import DEFAULT as RETENTION
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import parse_state
from tableside.serving.cli.parser import Parser
from tableside.serving.client import Client
from tableside.serving.client.address import URL_VARIABLE, Address, default_url
from tableside.serving.errors import ServingError
from tableside.serving.sizes import parse_bytes


def count(least: int, remedy: str = "") -> Callable[[str], int]:
    """An integer argument of at least `least`. remedy: an alternative, for the error."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise _unexpected(text, f"a whole number from {least} on" + (remedy and f"; {remedy}"))
        return value

    return parse


def state(text: str) -> tuple[int, int | None]:
    """VERSION or VERSION+SEQUENCE."""
    try:
        return parse_state(text)
    except VersionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def age(text: str) -> int:
    """Seconds of an age such as 90s, 30m, 1h or 7d."""
    if (age_s := parse_age(text)) is None:
        raise _unexpected(text, "an age such as 90s, 30m, 1h or 7d")
    return age_s


def retention(text: str) -> Retention:
    """A number of states, or an age such as 90s, 30m, 1h or 7d."""
    if text.isdecimal() and text.isascii():
        return Retention(int(text))
    if (age_s := parse_age(text)) is not None:
        return Retention(0, age_s)
    raise _unexpected(text, "a number of states from 0 on, or an age such as 90s, 30m, 1h or 7d")


def url(text: str) -> str:
    """A server's address, without a slash at its end."""
    try:
        Address.parse(text)
    except ValueError:
        raise _unexpected(
            text, "an address such as http://127.0.0.1:8000, https://HOST or unix:PATH"
        ) from None
    return text.rstrip("/")


def header(text: str) -> dict[str, str]:
    """A request header, "Name: value"; "@FILE": the headers in a file."""
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(
                f"{text[1:]} cannot be read: {error}; expected a file of headers"
            ) from None
    else:
        lines = [text]
    split = [line.partition(":") for line in lines if line.strip()]
    if not all(colon for _, colon, _ in split):
        raise _unexpected(
            text if not text.startswith("@") else f"a line of {text[1:]} without a colon", "Name: value"
        )
    return {name.strip(): value.strip() for name, _, value in split}


def size(text: str) -> int:
    """A number of bytes, as `serving.sizes` reads it."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(expected: str, is_inside: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_inside(value):
            raise _unexpected(text, expected)
        return value

    return parse


finite = _number("a finite number", math.isfinite)
share = _number("a share, 0 or more", lambda x: x >= 0 and math.isfinite(x))
microseconds = _number("microseconds, 0 or more", lambda x: x >= 0 and math.isfinite(x))
seconds = _number("seconds, more than 0 and less than a day (86400)", lambda x: 0 < x < 86400)
rate = _number("requests a second, more than 0 and at most a million", lambda x: 0 < x <= 1e6)
exponent = _number("an exponent of more than 1 and less than 100", lambda x: 1 < x < 100)


def host_port(text: str) -> tuple[str, int]:
    """PORT or HOST:PORT, to listen on; without a host on this machine alone."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise _unexpected(text, "a port from 0 to 65535, or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _unexpected(text: str, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"found {text!r}; expected {expected}")


AddCommand = Callable[[str, Callable[[argparse.Namespace], int], str], Parser]
KEEP = count(0, "0 keeps the live version alone")


def add_json(p: Parser) -> None:
    p.option("--json", "print JSON, whose keys docs/commands.md lists", action="store_true")


def add_cluster_token(p: Parser) -> None:
    p.option("--cluster-token-file", "file with the token of the servers that have rows", type=Path)


def add_keep_states(p: Parser) -> None:
    told = f"states to keep beside the live one: how many, or how long, as 1h (default: {RETENTION.states})"
    p.option("--keep-states", told, type=retention, default=RETENTION, metavar="N|AGE")


def add_server(p: Parser) -> None:
    """The options of every command that asks a running server."""
    with p.group("the server"):
        p.option(
            "--url",
            f"the server: http, https, or unix:PATH (default: {URL_VARIABLE}, now %(default)s)",
            type=url,
            default=default_url(),
        )
        add_headers(p)


def add_headers(p: Parser) -> None:
    p.option(
        "--header",
        "'Name: value' for every request; @FILE: those of a file, one a line; may come again",
        type=header,
        action="append",
        default=[],
        metavar="HEADER",
    )
    p.option("--ca", "PEM file of the authorities that https trusts (default: the system's)", metavar="FILE")


def server_address(options: argparse.Namespace) -> Address:
    """Returns the address of the server that a command asks. ServingError: its headers or authorities are
    invalid."""
    try:
        return Address.parse(options.url, _headers(options), options.ca)
    except ValueError as error:
        raise ServingError(str(error)) from error


def _headers(options: argparse.Namespace) -> dict[str, str]:
    return {name: value for given in options.header for name, value in given.items()}


def client_of(options: argparse.Namespace) -> Client:
    """A client of that server; ServingError: as of `server_address`."""
    found = server_address(options)
    return Client(found.base_url, headers=_headers(options), ca=options.ca)
