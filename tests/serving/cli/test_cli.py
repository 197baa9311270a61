"""The command line, as a user types it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exit_codes import code_of
from json_keys import documented_keys, keys_of
from support import rows_of, run_tableside

from tableside.loader.errors import VersionError
from tableside.loader.versions.versions import Model

DCP = Path(__file__).parents[2] / "fixtures" / "torchrec_dcp"


@pytest.mark.thorough
def test_from_a_checkpoint_to_published_versions(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init, load, list, inspect, verify, activate, gc, remove: each says what it did."""
    monkeypatch.chdir(tmp_path)
    tensors = {
        "sparse.embedding_bags.user.weight": torch.randn(100, 16),
        "dense.weight": torch.randn(64, 64),
        "b": torch.zeros(3),
    }
    torch.save(tensors, "model.pt")
    found = run_tableside("init", "model.pt", "--row-format", "int4")
    assert found.returncode == 0, found.stderr
    text = Path("model.toml").read_text()
    assert 'key = "sparse.embedding_bags.user.weight"' in text
    assert "[tables.user]" in text
    assert "#   dense.weight: a matrix" in text
    assert "# 100 rows x 16: 6,400 bytes of fp32," in text
    assert run_tableside("init", "model.pt").returncode == 1
    printed = run_tableside("init", "model.pt", "--row-format", "int4", "--out", "-")
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, text, "")

    for version in (1, 2):
        found = run_tableside("load", "model.toml", root=root)
        assert f"model version {version}: 1 tables" in found.stdout, found.stderr
        assert "on 2 MiB pages" in found.stdout
    assert "live" in run_tableside("list", root=root).stdout
    found = run_tableside("inspect", "model", root=root)
    assert "int4" in found.stdout
    assert "100" in found.stdout
    assert "version 1: whole" in run_tableside("verify", "model", root=root).stdout
    assert run_tableside("verify", "model", 2, root=root).returncode == 0
    assert "version 1 is live" in run_tableside("activate", "model", 1, root=root).stdout
    assert run_tableside("activate", "model", 9, root=root).returncode == 1
    assert run_tableside("remove", "model", root=root).returncode == 1
    assert "1 files removed" in run_tableside("gc", "--keep", 0, root=root).stdout
    assert "removed model with 1 versions" in run_tableside("remove", "model", "--all", root=root).stdout
    assert "nothing is published" in run_tableside("list", root=root).stdout


@pytest.mark.thorough
def test_staging_without_activating(tmp_path: Path, root: Path) -> None:
    np.save(tmp_path / "t.npy", rows_of(10, 8))
    (tmp_path / "m.toml").write_text('name = "m"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    run_tableside("load", tmp_path / "m.toml", root=root)
    run_tableside("load", tmp_path / "m.toml", "--no-activate", root=root)
    listed = run_tableside("list", root=root).stdout.splitlines()
    assert ["live" in line for line in listed if line.split()[:1] == ["m"]] == [True, False]


@pytest.mark.thorough
def test_old_versions_go_with_a_load(tmp_path: Path, root: Path) -> None:
    """--keep says how many stay for a rollback."""
    np.save(tmp_path / "t.npy", rows_of(10, 8))
    (tmp_path / "m.toml").write_text('name = "m"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    for _ in range(3):
        run_tableside("load", tmp_path / "m.toml", "--keep", 1, root=root)
    assert sorted(p.name for p in (root / "m").glob("*.segment")) == ["2.segment", "3.segment"]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("load", "nothing.toml"), "nothing.toml does not exist; write one with: tableside init CHECKPOINT"),
        (("init", "nothing.pt"), "checkpoint nothing.pt does not exist"),
        (("inspect", "nope"), "model 'nope'"),
        (("verify", "nope"), "model 'nope'"),
        (
            ("gc", "nope"),
            "it was never published (versions there: none); publish one with: tableside load model.toml",
        ),
        (
            ("load", "t.npy"),
            "t.npy is a checkpoint; expected a model.toml, which `tableside init t.npy` writes",
        ),
        (("load", "folder"), "folder is a folder; expected the model.toml in it: folder/model.toml"),
        (("load", "dcp"), "dcp is a checkpoint; expected a model.toml, which `tableside init dcp` writes"),
        (("load", "/"), "/: model.toml is a folder; expected a regular file"),
        (("inspect", "x.toml"), "x.toml is a file; expected the name of the model that it describes: m"),
        (
            ("export", "t.npy", "t", "--to", "o.npz"),
            "t.npy is a file; expected the name of a published model, which `tableside",
        ),
        (("reshard", "./dcp", "--owners", "2"), "./dcp is a file; expected the name of a published model"),
        (
            ("eval", "t.npy", "data.jsonl", "--out", "o"),
            "t.npy is a file; expected the name of a published model",
        ),
        (("activate", "../x", "1"), "model name '../x'"),
        (("remove", "nope", "1"), "version 1 is not published"),
        (("lookup", "m", "user", "--url", "http://127.0.0.1:9"), "expected FEATURE=IDS"),
        (("lookup", "m", "user=1", "--url", "http://127.0.0.1:9"), "cannot be reached"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(
    arguments: tuple[str, ...], message: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text('name = "m"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    Path("folder").mkdir()
    Path("folder/model.toml").touch()
    np.save("t.npy", rows_of(10, 8))
    Path("dcp").symlink_to(DCP)
    found = run_tableside(*arguments, root=root)
    assert found.returncode == 1
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
    assert "Traceback" not in found.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("found", ["-1", "two", "1.5"])
def test_a_load_that_keeps_less_than_nothing_is_refused(found: str, tmp_path: Path, root: Path) -> None:
    """Before anything is loaded or removed: the versions to roll back to are still there."""
    np.save(tmp_path / "t.npy", rows_of(10, 8))
    (tmp_path / "m.toml").write_text('name = "m"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    for _ in range(2):
        assert run_tableside("load", tmp_path / "m.toml", root=root).returncode == 0
    refused = run_tableside("load", tmp_path / "m.toml", "--keep", found, root=root)
    assert refused.returncode == 2
    assert (
        f"--keep: found '{found}'; expected a whole number from 0 on; 0 keeps the live version alone"
        in refused.stderr
    )
    assert sorted(p.name for p in (root / "m").glob("*.segment")) == ["1.segment", "2.segment"]
    with pytest.raises(VersionError, match="keep is -1; expected how many versions stay"):
        Model(root, "m").collect(-1)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "m", "--concurrency", "0"),
        ("bench", "m", "--seconds", "nan"),
        ("bench", "m", "--zipf", "0.5"),
        ("bench", "m", "--rate", "-1"),
        ("bench", "m", "--form", "short"),
        ("bench", "m", "--url", "http://[::1"),
        ("bench", "m", "--batch", "-1"),
        ("gc", "--keep", "-1"),
        ("load", "m.toml", "--threads", "-2"),
        ("load", "m.toml", "--keep", "-1"),
        ("reshard", "m", "--owners", "2", "--keep", "-1"),
        ("inspect", "m", "0"),
        ("verify", "m", "one"),
        ("activate", "m", "-1"),
        ("remove", "m", "0"),
        ("eval", "m", "x.jsonl", "--out", "o", "--batch", "0"),
        ("top", "--seconds", "0"),
    ],
)
def test_arguments_out_of_range_are_exit_code_2(arguments: tuple[str, ...], root: Path) -> None:
    found = run_tableside(*arguments, root=root)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert "found '" in found.stderr and "expected" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("serve", "m", "--prot", "80"),
            "serve: error: found --prot 80, which means nothing here; did you mean '--port'?",
        ),
        (("load", "m.toml", "--onyl=t"), "found --onyl=t, which means nothing here; did you mean '--only'?"),
        (("list", "all"), "found all, which means nothing here; tableside list --help says what does"),
        (("lod", "m.toml"), "did you mean 'load'?"),
        (
            ("serve", "m", "--placement", "hmb"),
            "found 'hmb'; expected one of: auto, hbm, hybrid, cached, zero_copy, host",
        ),
        (
            ("load", "m.toml", "--max-memory", "lots"),
            "--max-memory: 'lots' is not a number of bytes; expected such as 64MiB",
        ),
        (
            ("serve", "m", "--max-body-bytes", "3Q"),
            "--max-body-bytes: '3Q' is not a number of bytes; expected such as 64MiB",
        ),
    ],
)
def test_a_wrong_command_line_says_what_was_meant(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("TABLESIDE_WOKRERS", "which is no setting; did you mean 'TABLESIDE_WORKERS'?"),
        ("tableside_Wokrers", "which is no setting; did you mean 'TABLESIDE_WORKERS'?"),
        ("TABLESIDE_COLOUR", "which is no setting; unset it"),
        ("TABLESIDE_SHARING", "which is no setting"),
        ("TABLESIDE_SERVICE_HOST", "set enableServiceLinks: false for the pod"),
        ("TABLESIDE_METRICS_PORT_8000_TCP_ADDR", "set enableServiceLinks: false for the pod"),
    ],
)
def test_an_unknown_variable_is_refused(
    name: str, remedy: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command, before it does anything; settings in any case, and what an image sets, are taken."""
    monkeypatch.setenv("tableside_root", str(root))
    monkeypatch.setenv("TABLESIDE_IMAGE", "cpu")
    assert code_of("list") == 0
    assert f"nothing is published under {root}" in capsys.readouterr().out
    monkeypatch.setenv(name, "2")
    assert code_of("list") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tableside: the environment has {name}, ") and remedy in said


def test_a_mistyped_model_is_answered_with_the_nearest(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "t.npy", rows_of(10, 8))
    (tmp_path / "m.toml").write_text('name = "clicks"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    assert code_of("load", str(tmp_path / "m.toml"), "--root", str(root)) == 0
    assert code_of("inspect", "clikcs", "--root", str(root)) == 1
    assert "no version is live (versions there: none); did you mean 'clicks'?\n" in capsys.readouterr().err
    (root / "other").mkdir()  # as a load leaves it that failed
    assert code_of("inspect", "other", "--root", str(root)) == 1
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.thorough
def test_a_half_written_checkpoint(tmp_path: Path, root: Path) -> None:
    """One line, exit code 1, and the version that was published before is still there."""
    np.save(tmp_path / "t.npy", rows_of(1000, 8))
    (tmp_path / "m.toml").write_text('name = "m"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    assert run_tableside("load", tmp_path / "m.toml", root=root).returncode == 0
    os.truncate(tmp_path / "t.npy", 5000)
    found = run_tableside("load", tmp_path / "m.toml", root=root)
    assert (found.returncode, found.stderr.count("\n")) == (1, 1)
    assert "truncated" in found.stderr and "t.npy" in found.stderr
    assert "live" in run_tableside("list", root=root).stdout


@pytest.mark.parametrize(("dim", "text"), [(64, "(3.8 x less than fp32)"), (1, "x the bytes of fp32)")])
@pytest.mark.drawn(0.5)
def test_a_load_says_what_its_bytes_are_to_fp32(dim: int, text: str, tmp_path: Path, root: Path) -> None:
    """Rows of one number grow where each takes 16 bytes: then it does not say that they are 0.2 x less."""
    np.save(tmp_path / "t.npy", rows_of(100_000, dim))
    (tmp_path / "m.toml").write_text('name = "m"\ncheckpoint = "t.npy"\n[tables.t]\nkey = "t"\n')
    found = run_tableside("load", tmp_path / "m.toml", root=root)
    assert found.returncode == 0 and text in found.stdout, found.stdout + found.stderr


@pytest.mark.drawn(0.25)
def test_lookup_and_bench_against_a_server(server: Any) -> None:
    found = run_tableside("lookup", "demo", "user=1,2;3", "text=4", "--url", server.url)
    assert "user float32 [2, 64]" in found.stdout
    found = run_tableside("lookup", "demo", "user=1", "--json", "--url", server.url)
    assert found.stdout.startswith('{"user":[[')
    assert "id 5000 at position 0" in run_tableside("lookup", "demo", "user=5000", "--url", server.url).stderr
    wrong = run_tableside("lookup", "demo", "user=x", "--url", server.url).stderr
    assert "user: invalid literal for int() with base 10: 'x'; expected FEATURE=IDS" in wrong
    found = run_tableside(
        "bench", "demo", "--url", server.url, "--seconds", 0.3, "--concurrency", 2, "--zipf", 1.2
    )
    assert found.returncode == 0, found.stderr
    assert "p99.9 ms" in found.stdout
    assert (
        "demo: 4 features x batch 32 x 20 ids (on average, 0 to 40 a bag, drawn anew for each request)"
        in found.stdout
    )
    assert "512 different named requests of" in found.stdout
    found = run_tableside(
        "bench", "demo", "--url", server.url, "--seconds", 0.2, "--same", "--rate", 100, "--arrivals", "even"
    )
    assert found.returncode == 0, found.stderr
    assert "the same in every bag" in found.stdout
    assert "100 requests/s due at even times" in found.stdout
    found = run_tableside(
        "bench", "demo", "--url", server.url, "--seconds", 0.3, "--concurrency", 2, "--json"
    )
    told = json.loads(found.stdout)
    assert found.returncode == 0 and told["features"] == 4 and keys_of(told) == documented_keys("bench")
    (form,) = told["forms"]
    assert form["requests"] > 0 and form["ids_per_s"] == pytest.approx(form["requests_per_s"] * 4 * 32 * 20)


@pytest.mark.thorough
def test_bench_tells_why_requests_fail(server: Any) -> None:
    """The pooled features of demo give fp32 and fp16, which the compact form does not put side by side:
    exit code 1."""
    found = run_tableside("bench", "demo", "--url", server.url, "--seconds", 0.2, "--form", "compact")
    assert found.returncode == 1
    assert "failed, the first of: 400: {" in found.stdout
    command = ("bench", "demo", "--url", server.url, "--seconds", 0.2, "--form", "compact", "--json")
    found = run_tableside(*command)
    assert found.returncode == 1 and json.loads(found.stdout)["forms"][0]["failure"].startswith("400: {")


@pytest.mark.thorough
def test_a_backend_by_name_is_shown(root: Path, tmp_path: Path, start: Any) -> None:
    """The choice is open: it is in the metadata, and answers are the same."""
    answers = []
    for backend in ("native", "fbgemm"):
        server = start("--backend", backend)
        assert f"lookups on {backend}" in server.said
        (described,) = server.get("/v1/models").json()["models"]
        assert described["backend"].startswith(backend)
        import httpx

        reply = httpx.post(
            server.url + "/v1/lookup", json={"model": "demo", "features": {"user": [[1, 2, 3]]}}, timeout=300
        )
        answers.append(np.array(reply.json()["vectors"]["user"]))
    np.testing.assert_allclose(answers[0], answers[1], rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_compile_says_what_it_needs(
    root: Path, publish: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """An architecture, where no GPU is here to ask; one that there is; and no interpreter in Triton's
    place."""
    publish({"t": np.zeros((4, 8), np.float32)})
    environment = {**os.environ, "TABLESIDE_ROOT": str(root)}
    environment.pop("TRITON_INTERPRET", None)

    def run(*arguments: str, **more: str) -> str:
        command = [sys.executable, "-m", "tableside", "compile", "demo", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**environment, **more}, check=False
        )
        assert done.returncode != 0
        return done.stderr

    assert "--arch is 'h100'; expected a GPU's architecture, such as sm_90" in run("--arch", "h100")
    assert "unset it" in run("--arch", "sm_90", TRITON_INTERPRET="1")
    if not torch.cuda.is_available():
        assert "there is no GPU here; name the architecture" in run()


@pytest.mark.thorough
def test_compile_says_which_kernels_were_not_there(
    root: Path, publish: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    publish({"t": np.zeros((4, 8), np.float32)}, features={"t": {"table": "t", "pooling": "none"}})
    asked = "compile", "demo", "--arch", "sm_90", "--placement", "hbm"
    said = [run_tableside(*asked, root=root).stdout for _ in range(2)]
    assert "lookup, unpooled" in said[0] and f"kernels for sm_90 in {tmp_path}" in said[0]
    assert f"all kernels for sm_90 in {tmp_path} were there before" in said[1]
