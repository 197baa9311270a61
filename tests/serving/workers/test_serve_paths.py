"""`tableside serve` of a model.toml and of a checkpoint: loaded first where the live version is not what
they describe."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from scorers import Ctr, exported
from support import rows_of, run_tableside

from tableside.loader.errors import ModelError
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import read_model
from tableside.loader.versions.versions import Model
from tableside.serving.cli.local import local_server
from tableside.serving.cli.output import load_where_named
from tableside.serving.client import Client
from tableside.serving.errors import ServingError
from tableside.serving.settings import RootSettings

MODEL = 'name = "m"\ncheckpoint = "c.npz"\n[tables.user]\nkey = "user"\n'


@pytest.fixture
def settings(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> RootSettings:
    """Of commands in a folder with a checkpoint and a model.toml for it."""
    monkeypatch.chdir(tmp_path)
    np.savez("c.npz", user=rows_of(100, 8))
    Path("m.toml").write_text(MODEL)
    return RootSettings(root=root)


def versions(settings: RootSettings, *arguments: str) -> dict[str, list[int]]:
    """The versions of each model that `serve` would serve, once they are loaded."""
    return {name: Model(settings.root, name).versions() for name in load_where_named(arguments, settings)}


@pytest.mark.drawn(0.25)
def test_a_checkpoint_is_served_in_one_command(settings: RootSettings) -> None:
    """Its tables are looked up as if `init` and `load` had come before; the server's line alone is on
    stdout."""
    with local_server(["c.npz"], root=settings.root) as server, Client(server.url) as client:
        (vectors,) = client.lookup("c", {"user": [[7]]})["user"]
    np.testing.assert_allclose(vectors, rows_of(100, 8)[7], atol=0.02)
    assert Model(settings.root, "c").versions() == [1]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--port", "{port}"), "cannot listen on 127.0.0.1:{port}"),
        (("--port", 0, "--grpc-port", "{port}"), "cannot listen on 127.0.0.1:{port} for gRPC"),
        (("--port", 0, "--devices", "0,1"), "2 devices and 1 workers"),
        (("--port", 0, "--traces", "nowhere"), "traces"),
    ],
    ids=["port", "grpc port", "devices", "exporter"],
)
def test_nothing_is_loaded_for_a_server_that_cannot_start(
    settings: RootSettings, options: tuple[object, ...], what: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = [str(one).format(port=port) for one in options]
        found = run_tableside("serve", "c.npz", *said, root=settings.root)
    assert found.returncode in (1, 2) and what.format(port=port) in found.stderr
    assert not Model(settings.root, "c").versions()


@pytest.mark.drawn(0.5)
def test_what_is_live_is_not_loaded_again(settings: RootSettings, capfd: pytest.CaptureFixture[str]) -> None:
    """By another path too."""
    assert versions(settings, "m.toml") == {"m": [1]}
    assert "loading m.toml as m" in capfd.readouterr().err
    assert versions(settings, "m.toml") == {"m": [1]} == versions(settings, "m")
    assert "m.toml is published as m version 1" in capfd.readouterr().err
    assert versions(settings, str(Path("m.toml").resolve())) == {"m": [1]}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", ["checkpoint", "model.toml", "activate", "damage", "only"])
def test_what_changed_is_loaded_again(change: str, settings: RootSettings) -> None:
    """A file of the checkpoint, what model.toml says, which version is live, whether it is whole and was
    loaded whole."""
    root, model = settings.root, Model(settings.root, "m")
    Path("m.toml").write_text(MODEL + '[tables.item]\nkey = "user"\n')
    load(read_model(Path("m.toml")), root)
    if change == "checkpoint":
        np.savez("c.npz", user=rows_of(100, 8, 1))
    elif change == "model.toml":
        Path("m.toml").write_text(MODEL + 'row_format = "int4"\n[tables.item]\nkey = "user"\n')
    elif change == "activate":
        Path("other.toml").write_text(MODEL)
        load(read_model(Path("other.toml")), root)
    elif change == "damage":
        model.mark_damaged(1)
    else:
        load(read_model(Path("m.toml")), root, LoadSettings(only=("item",)))
    before = model.current()
    assert versions(settings, "m.toml")["m"][-1] == before + 1 == model.current()
    assert versions(settings, "m.toml")["m"][-1] == before + 1


@pytest.mark.thorough
def test_a_scorer_that_changed_is_loaded_again(settings: RootSettings) -> None:
    """The program's bytes count, not its name."""
    for name, scores in (("s.pt2", 1), ("t.pt2", 2)):
        Path(name).write_bytes(exported(Ctr(8, 8, 3, scores), user=8, clicked=8, context=3))
    Path("m.toml").write_text(MODEL + '[scorer]\nprogram = "s.pt2"\n')
    assert versions(settings, "m.toml") == {"m": [1]} == versions(settings, "m.toml")
    os.replace("t.pt2", "s.pt2")
    assert versions(settings, "m.toml") == {"m": [1, 2]}


@pytest.mark.drawn(0.5)
def test_names_of_models_and_paths_are_told_apart(settings: RootSettings) -> None:
    """A folder of a published model's name is that model; as ./folder it is the folder. A folder may hold
    the model.toml."""
    Path("ckpt").mkdir()
    os.replace("c.npz", "ckpt/c.npz")
    os.replace("m.toml", "ckpt/model.toml")
    assert versions(settings, "ckpt") == {"m": [1]}
    load(read_model(Path("ckpt/model.toml")), settings.root)
    Path("m").mkdir()
    assert versions(settings, "m") == {"m": [1, 2]}
    with pytest.raises(ServingError, match=r"ckpt, m: two of them are model 'm'"):
        versions(settings, "ckpt", "m")
    with pytest.raises(ModelError, match="model name '-x'"):
        Model(settings.root, load_where_named(["-x"], settings)[0])
    with pytest.raises(ModelError, match=r"nosuch\.toml does not exist; write one with"):
        versions(settings, "nosuch.toml")


@pytest.mark.drawn(0.5)
def test_a_load_that_fails_serves_nothing(settings: RootSettings, capfd: pytest.CaptureFixture[str]) -> None:
    """The load says why, in one line before the server's."""
    Path("m.toml").write_text(MODEL.replace('key = "user"', 'key = "item"'))
    with pytest.raises(ServingError, match=r"m\.toml was not loaded, so nothing is served"):
        versions(settings, "m.toml")
    assert "there is no tensor 'item'" in capfd.readouterr().err
    assert Model(settings.root, "m").versions() == []
