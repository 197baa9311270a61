"""The running server that a command asks: its address, and the headers and authorities that go with it."""

import argparse

from tableside.serving.cli.arguments import header, url
from tableside.serving.cli.parser import Parser
from tableside.serving.client import Client
from tableside.serving.client.address import URL_VARIABLE, Address, default_url
from tableside.serving.errors import ServingError


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


def address(options: argparse.Namespace) -> Address:
    """Returns the server's address from the options. ServingError: headers or authorities are invalid."""
    try:
        return Address.parse(options.url, _headers(options), options.ca)
    except ValueError as error:
        raise ServingError(str(error)) from error


def _headers(options: argparse.Namespace) -> dict[str, str]:
    return {name: value for given in options.header for name, value in given.items()}


def client(options: argparse.Namespace) -> Client:
    """A client of that server; ServingError: as of `address`."""
    found = address(options)
    return Client(found.base_url, headers=_headers(options), ca=options.ca)
