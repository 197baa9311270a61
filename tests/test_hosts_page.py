"""The commands of docs/hosts.md do what it says: two owners, a server of the whole, and then three owners."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from support import end, until

from tableside.serving.client import Client, ClientError

TEXT = (Path(__file__).parent.parent / "docs/hosts.md").read_text()
SECTIONS = ("From two processes on a laptop", "More or fewer owners")


def commands(section: str) -> list[str]:
    text = TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()


@pytest.mark.drawn(0.25)
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """Ports and roots are others here. Answers are those of one host, of the first owners and of the next
    ones."""
    roots = {
        f"/dev/shm/{name}": Path(f"/dev/shm/tableside-test-{uuid.uuid4().hex[:12]}")
        for name in ("owner", "door")
    }
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(6)]
    names = ["8101", "8102", "8111", "8112", "8113", "8000"]
    ports = {name: str(one.getsockname()[1]) for name, one in zip(names, listening, strict=True)}
    for one in listening:
        one.close()

    def here(text: str) -> str:
        text = re.sub(r"\b8\d{3}\b", lambda found: ports[found[0]], text)
        for there, root in roots.items():
            text = text.replace(there, str(root))
        return text

    (spec,) = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "model.toml").write_text(here(spec.replace("ads.safetensors", "ads.npz")))
    user = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
    np.savez(tmp_path / "ads.npz", user=user, country=np.ones((5, 4), np.float32))
    servers: list[subprocess.Popen[str]] = []

    def run(line: str) -> None:
        name, command, *rest = shlex.split(here(line))
        assert name == "tableside"
        words = [sys.executable, "-m", "tableside", command, *rest]
        if command != "serve":
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            return
        words = words[:-1] if rest[-1] == "&" else words
        words += [] if "--port" in words else ["--port", ports["8000"]]
        servers.append(subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
        assert servers[-1].stdout is not None and "http://" in servers[-1].stdout.readline()

    try:
        first, then = map(commands, SECTIONS)
        for line in first:
            run(line)
        with Client(f"http://127.0.0.1:{ports['8000']}") as client:
            asked = {"user": [[n] for n in range(100)], "country": [[0], [4]] * 50}
            before = client.lookup("ads", asked)
            assert np.abs(before["user"] - user).max() < 0.1 and client.late_rows() == {}
            removals = [line for line in then if " remove " in line]
            for line in then[: -len(removals)]:
                run(line)
            until(lambda: client.models()[0]["version"] == 2, what="the server to turn")
            for line in removals:
                run(line)
            for server in servers[:2]:
                end(server)

            def is_same() -> bool:
                try:
                    got = client.lookup("ads", asked)
                except ClientError:
                    return False
                return all(np.array_equal(got[name], before[name]) for name in asked)

            until(is_same, what="the same answer")
        assert len(servers) == 6
    finally:
        for server in servers:
            end(server)
        for root in roots.values():
            for found in Path("/dev/shm").glob(f"{root.name}*"):
                shutil.rmtree(found)
