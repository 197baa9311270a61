"""What the commands say of published versions: their tables, features and scorers."""

from pathlib import Path

import numpy as np
import pytest
from scorers import Ctr, exported
from support import rows_of

from tableside.serving.cli.cli import main


@pytest.fixture
def folder(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a checkpoint of three tables of dim 8. Commands publish in `root`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TABLESIDE_ROOT", str(root))
    np.savez("c.npz", user=rows_of(100, 8), item=rows_of(50, 8, 1), contexts=rows_of(9, 8, 2))
    return tmp_path


def say(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints."""
    assert main([*arguments]) == code
    return capsys.readouterr().out


def write(scorer: str, *features: str) -> None:
    tables = "".join(f"[tables.{t}]\nkey = '{t}'\n" for t in ("user", "item", "contexts"))
    listed = "".join(f"[features.{f}]\ntable = '{f}'\n" for f in features)
    Path("m.toml").write_text(f"name = 'm'\ncheckpoint = 'c.npz'\n{tables}{listed}[scorer]\n{scorer}")


def test_a_load_says_what_the_scorer_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An input that became dense, the feature that may have been meant by it, and one that is not scored."""
    Path("s.pt2").write_bytes(exported(Ctr(8, 8, 3), user=8, clicked=8, context=3))
    write("program = 's.pt2'\ninputs = {clicked = 'item'}", "user", "item", "contexts")
    said = say(capsys, "load", "m.toml")
    assert "scorer program(user, clicked=item, dense context)\n" in said
    assert (
        "scorer input context is called like no feature: a request brings it as a dense tensor of width 3; "
        "did you mean 'contexts'?\n" in said
    )
    assert "feature contexts is not scored: no input of the scorer is called like it, or given it" in said
    assert "feature user" not in said and "feature item" not in said
    assert "program(user, clicked=item, dense context)" in " ".join(say(capsys, "list").split())
    rows = [line.split() for line in say(capsys, "inspect", "m").splitlines()]
    assert [row for row in rows if row[:1] in (["user"], ["clicked"], ["context"])][-3:] == [
        ["user", "user", "8"],
        ["clicked", "item", "8"],
        ["context", "(dense:", "a", "request", "brings", "it)", "3"],
    ]


def test_a_load_whose_scorer_takes_all_says_no_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("kind = 'dot'\nfeatures = ['user', 'item']", "user", "item")
    said = say(capsys, "load", "m.toml")
    assert "scorer dot(user, item)\n" in said and "not scored" not in said and "dense" not in said
