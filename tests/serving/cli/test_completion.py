"""What shells complete."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tableside.serving.cli.cli import main, parser
from tableside.serving.cli.parser import SHELLS, script


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with two models; what begins with a dot is none."""
    for name in ("ads", "clicks", ".metrics-1"):
        (tmp_path / "a root" / name).mkdir(parents=True)
    monkeypatch.setenv("TABLESIDE_ROOT", str(tmp_path / "a root"))
    return tmp_path / "a root"


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    code = (
        script(parser(), "bash")
        + 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tableside; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    found = subprocess.run(
        ["bash", "-uc", code, "bash", "tableside", *words], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    return found.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["re"], ["remove", "reshard"]),
        (["serve", "--pl"], ["--placement"]),
        (["serve", "--placement", "h"], ["hbm", "hybrid", "host"]),
        (["serve", ""], ["ads", "clicks"]),
        (["inspect", "c"], ["clicks"]),
        (["eval", "a"], ["ads"]),
        (["load", ""], []),  # files, which bash itself completes
        (["completion", "f"], ["fish"]),
        (["list", "--j"], ["--json"]),
        (["nosuch", "-"], []),
        (["cl"], ["cluster"]),
        (["cluster", ""], ["plan", "status", "turn"]),
        (["cluster", "s"], ["status"]),
        (["cluster", "status", "--j"], ["--json"]),
        (["cluster", "plan", "--h"], ["--help", "--hosts"]),
        (["cluster", "status", ""], ["ads", "clicks"]),
    ],
)
def test_bash(words: list[str], offered: list[str], root: Path) -> None:
    assert completed(*words) == offered


def test_bash_without_a_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root that is not there yet has no models."""
    monkeypatch.setenv("TABLESIDE_ROOT", str(root / "nothing"))
    assert completed("serve", "") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_known(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To each shell's script, which the command prints."""
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert said == script(parser(), shell)
    for name, command in parser().commands().items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for option in command.option_names():
            long = option.removeprefix("--")
            of_fish = re.search(rf"{seen}(; and not __fish_seen_subcommand_from cluster)?' -l {long}", said)
            assert option == "-h" or of_fish or f" {option}" in said


@pytest.mark.parametrize("shell", [s for s in SHELLS if shutil.which(s)])
def test_a_shell_reads_its_script(shell: str) -> None:
    """Of the shells that this machine has."""
    found = subprocess.run(
        [shell, "-n"], input=script(parser(), shell), capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
