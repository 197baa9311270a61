"""perf_analyzer loads a server without being told the version (-x): it finds it by the version whose
queue.count grew.

The program comes with tritonclient's wheels up to 2.46 (bin/perf_analyzer; it needs libb64 and libcudart).
Where it is on PATH it is run; its calls, as it makes them, are made in any case.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import TABLES

DATA = {
    "user": {"content": [1, 2, 3, 4], "shape": [2, 2]},
    "clicked": {"content": [1, 2, 3, 4], "shape": [2, 2]},
    "liked": {"content": [1, 2, 3, 4], "shape": [2, 2]},
    "text.values": {"content": [4, 5, 6], "shape": [3]},
}


def statistics(client: httpx.Client) -> dict[str, Any]:
    (found,) = client.get("/v2/models/demo/stats").json()["model_stats"]
    return dict(found["inference_stats"], version=found["version"])


def test_its_calls(server: Any) -> None:
    """It asks for every output of the metadata, masks too, and then for the statistics of the version that
    was asked."""
    with httpx.Client(base_url=server.url, headers={"User-Agent": "libcurl-agent/1.0"}) as client:
        metadata, config = client.get("/v2/models/demo").json(), client.get("/v2/models/demo/config").json()
        assert all(i["optional"] for i in config["input"]) and config["max_batch_size"] == 0
        assert "statistics" in client.get("/v2").json()["extensions"]
        before = statistics(client)
        tensors = {n: b"".join(i.to_bytes(8, "little") for i in d["content"]) for n, d in DATA.items()}
        inputs = [
            {
                "name": n,
                "datatype": "INT64",
                "shape": d["shape"],
                "parameters": {"binary_data_size": len(tensors[n])},
            }
            for n, d in DATA.items()
        ]
        outputs = [{"name": o["name"], "parameters": {"binary_data": True}} for o in metadata["outputs"]]
        head = json.dumps({"id": "", "inputs": inputs, "outputs": outputs}).encode()
        sent = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        for _ in range(7):
            answer = client.post(
                "/v2/models/demo/infer", content=head + b"".join(tensors.values()), headers=sent
            )
            assert answer.status_code == 200
        after = statistics(client)
    assert len(metadata["outputs"]) == 2 * 4 and len(TABLES) == 3
    assert after["version"] == metadata["versions"][-1] == "1"
    for count in ("queue", "success", "compute_input", "compute_infer", "compute_output"):
        assert after[count]["count"] - before[count]["count"] == 7


@pytest.mark.skipif(
    shutil.which("perf_analyzer") is None, reason="perf_analyzer is not on PATH; its calls are tested above"
)
def test_the_program_itself(server: Any, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"data": [DATA]}))
    command = [
        "perf_analyzer",
        "-m",
        "demo",
        "-u",
        f"127.0.0.1:{server.port}",
        "-p",
        "500",
        "-s",
        "90",
        "-r",
        "5",
    ]
    done = subprocess.run(
        [*command, "--input-data", str(tmp_path / "data.json")], capture_output=True, text=True, timeout=300
    )
    found = re.search(r"Successful request count: (\d+)", done.stdout)
    assert found and int(found[1]) > 10, done.stdout + done.stderr
