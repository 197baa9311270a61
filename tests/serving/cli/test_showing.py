"""What the commands say of published versions: their tables, features and scorers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_keys import documented_keys, keys_of
from scorers import Ctr, exported
from support import flip_bit, rows_of, run_tableside

from tableside.serving.cli.cli import main
from tableside.serving.cli.commands import showing


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


@pytest.mark.drawn(0.5)
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
    assert "program" in say(capsys, "list").split()
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


def test_list_fits_80_columns(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every column that it may have, of a model of some GB."""
    sizes = dict.fromkeys(("bytes", "delta_bytes", "shared_bytes"), 98_760_000_000)
    named = {"model": "recommender_v2", "version": 12, "sequence": 345, "state": "live"}
    found = {"created": "2026-11-28T09:06:00", "tables": 26, "scorer": {"kind": "program"}, "error": None}
    found |= {"expired": 0, "evicted": 0}
    monkeypatch.setattr(showing, "models", lambda *_: [None])
    monkeypatch.setattr(showing, "_versions", lambda _: [named | found | sizes])
    heads, row, _ = say(capsys, "list", "--root", str(root)).splitlines()
    assert re.sub(" +", " ", row) == (
        "recommender_v2 12+345 live 11-28 09:06 26 98.76 GB 98.76 GB 98.76 GB program"
    )
    assert len(heads) <= 80 and len(row) <= 80


def test_list_and_inspect_as_json(folder: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented_keys keys and no others, with what was loaded; a damaged and an unfinished version
    have them too."""
    write("kind = 'dot'\nfeatures = ['user', 'item']", "user", "item")
    for _ in range(2):
        say(capsys, "load", "m.toml")
    (root / "m" / "7.segment.partial").touch(mode=0o600)
    (root / "m" / "1.damaged").touch(mode=0o600)
    text = say(capsys, "list", "--json")
    listed = json.loads(text)
    assert text.count("\n") == 1 and keys_of(listed) == documented_keys("list") | documented_keys("scorer")
    assert [(v["version"], v["state"]) for v in listed["versions"]] == [
        (1, "damaged"),
        (2, "live"),
        (7, "loading"),
    ]
    assert len({frozenset(v) for v in listed["versions"]}) == 1
    assert (
        "activate another version" in listed["versions"][0]["error"]
        and listed["versions"][2]["bytes"] is None
    )
    found = json.loads(say(capsys, "inspect", "m", "--json"))
    keys = documented_keys("inspect") | documented_keys("inspect`: `tables") | documented_keys("scorer")
    # of an owner, and of rows on a disk, which this version has not
    assert keys_of(found) == keys - {"number", "owners", "hot_rows", "hot_bytes"}
    assert found["disk"] is None
    assert {t["name"]: (t["rows"], t["dim"], t["ids"], t["is_raw"]) for t in found["tables"]} == {
        "user": (100, 8, 100, False),
        "item": (50, 8, 50, False),
        "contexts": (9, 8, 9, False),
    }
    assert found["scorer"]["inputs"][1] == {"name": "item", "feature": "item", "width": 8}
    assert found["bytes"] == (root / "m" / "2.segment").stat().st_size and found["owner"] is None


def test_what_commands_do_as_json(folder: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented keys and no others, in one line, with what was done."""

    def do(*arguments: str, code: int = 0, keys: str = "") -> dict[str, Any]:
        text = say(capsys, *arguments, "--json", code=code)
        found: dict[str, Any] = json.loads(text)
        assert text.count("\n") == 1 and keys_of(found) == documented_keys(keys or arguments[0])
        return found

    write("kind = 'dot'\nfeatures = ['user', 'item']", "user", "item")
    loads = [do("load", "m.toml", "--keep", "0") for _ in range(2)]
    segments = [str(root / "m" / f"{version}.segment") for version in (1, 2)]
    assert [one["path"] for one in loads] == segments and loads[1]["removed"] == [segments[0]]
    assert (loads[1]["version"], loads[1]["live"], loads[1]["tables"]) == (2, True, 3)
    assert loads[1]["bytes"] == (root / "m" / "2.segment").stat().st_size
    assert do("verify")["versions"] == [{"model": "m", "version": 2, "damage": None}]
    assert do("compact", "m") == dict.fromkeys(documented_keys("compact")) | {
        "model": "m",
        "compacted": False,
        "version": 2,
        "removed": [],
    }
    values = dict(np.load("c.npz"))
    values["user"][3] += 1
    np.savez("c.npz", **values)
    changed = do("load", "m.toml", "--as-delta", keys="load --as-delta")
    assert (changed["version"], changed["changed_rows"], changed["compared_rows"]) == (2, 1, 159)
    done = do("compact", "m", "--keep", "1")
    assert done["removed"] == []
    assert (done["compacted"], done["version"], done["rows"], done["merged"]) == (True, 3, 159, 1)
    assert do("gc", "--keep", "0")["removed"] == [segments[1]]
    flip_bit(root / "m" / "3.segment", (root / "m" / "3.segment").stat().st_size // 2)
    (damaged,) = do("verify", "m", "3", code=1)["versions"]
    assert "the checksum is wrong" in damaged["damage"]


@pytest.mark.parametrize("text", ["nosuch.safetensors", "nosuch.npz", "no/such"])
def test_a_checkpoint_that_is_not_there_is_told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", text]) == 1
    assert f"checkpoint {text} does not exist" in capsys.readouterr().err


@pytest.mark.thorough
def test_nothing_is_cut_in_a_pipe(folder: Path, root: Path) -> None:
    """A key of two hundred characters stands whole in one line."""
    key = "a_long_name." * 20
    np.savez("c.npz", **{key: rows_of(4, 8)})
    Path("m.toml").write_text(f"name = 'm'\ncheckpoint = 'c.npz'\n[tables.t]\nkey = '{key}'\n")
    assert run_tableside("load", "m.toml", root=root).returncode == 0
    shown = run_tableside("inspect", "m", root=root).stdout
    (line,) = (line for line in shown.splitlines() if line.split()[:1] == ["t"] and key in line)
    assert "int8" in line
