"""What `--help` and usage errors say."""

import shlex

import pytest
from exit_codes import code_of

from tableside.serving.cli.cli import parser


def test_what_help_says_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten commands and at most ten options of each come first, the others under titles."""
    monkeypatch.setenv("COLUMNS", "80")
    commands = parser().commands()
    for name in ("", *commands):
        assert code_of(*name.split(), "--help") == 0
        said = capsys.readouterr().out
        assert all(len(line) <= 80 for line in said.splitlines()), said
        first = said.split("\noptions:\n")[1].split("\n\n")[0]
        assert len([line for line in first.splitlines() if line.startswith("  -")]) <= 10, said
    assert code_of("--help") == 0
    first, others = capsys.readouterr().out.split("\ncommands:\n")[1].split("\nmore commands:\n")
    named = [line[2:17].strip() for part in (first, others) for line in part.splitlines() if line]
    assert sorted(named) == sorted(commands) and first.count("\n") == 10


@pytest.mark.parametrize("name", ["load", "serve", "follow", "eval", "plan", "apply", "cluster plan"])
def test_examples_of_help_are_command_lines(name: str) -> None:
    """Each is what the command's parser takes."""
    examples = parser().commands()[name].sections["examples"]
    assert len(examples) == 3
    for line in examples:
        first, *rest = shlex.split(line, comments=True)
        assert first == "tableside" and parser().parse_args(rest).command == name


def test_a_usage_error_is_a_short_usage_and_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage names what has to be given, and no other option."""
    assert code_of("reshard", "ads", "--owner", "2") == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: tableside reshard [OPTION ...] --owners OWNERS model"
    assert error == "tableside reshard: error: the following arguments are required: --owners"
    assert code_of("cluster", "status", "ads", "--jsn") == 2
    assert capsys.readouterr().err.endswith("found --jsn, which means nothing here; did you mean '--json'?\n")
    assert code_of("cluster") == 2
    assert capsys.readouterr().err.startswith("usage: tableside cluster [OPTION ...] COMMAND ...\n")
    assert code_of("nosuch") == 2
    assert capsys.readouterr().err.startswith("usage: tableside [OPTION ...] COMMAND ...\n")


def test_the_help_of_serve_shows_first_what_most_need(capsys: pytest.CaptureFixture[str]) -> None:
    """The other settings come in groups."""
    assert code_of("serve", "--help") == 0
    _, _, _, first, *groups = capsys.readouterr().out.split("\n\n")
    shown = [line.split()[0].rstrip(",") for line in first.splitlines() if line.startswith("  -")]
    expected = "-h --root --owner --all --host --port --workers --devices --placement --hbm-budget"
    assert shown == expected.split()
    assert "addresses:" in groups[0] and len(groups) == 11 and "examples:" in groups[-1]
