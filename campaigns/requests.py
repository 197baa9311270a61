"""Requests that are wrong in every way: mutated ones in process, raw bytes over sockets, schemathesis over
the JSON interface.

Promised: whatever comes is answered rightly or refused with a 4xx and a reason; no exception but a refusal
leaves the application, no worker dies, no descriptor leaks. On a connection every byte belongs to exactly one
request: there are as many answers as requests, in order, and a body is never answered as a request.

The oracle of the first part is a plain reference (campaigns/request_cases.py): what is right must be
answered, an answer must be what the reference says. Of the second, the script that the bytes were made from
(campaigns/raw_cases.py). Of the third, schemathesis, which generates cases from /openapi.json and finds
answers of 500 and above.
"""

import asyncio
import importlib.util
import json
import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from benchmarks import wire
from campaigns import raw_cases, raw_http
from campaigns.common import SameWorkers, folders, publish, random_of, standalone
from campaigns.request_cases import VALUE, Case, Unclear, Vectors, answer_of, mutated, right_v1, right_v2
from tableside.serving.cli.local import LocalServer, local_server
from tableside.serving.executors.admission import Hold
from tableside.serving.http.app import Application
from tableside.serving.http.asgi import HOLD
from tableside.serving.settings import ServerSettings

SHARES = {"in process": 0.6, "sockets": 0.1, "schemathesis": 0.3}
CASES_A_TURN, CONNECTIONS = 2000, 16
LONGEST_START_S = 60
FP16_MAX = 65_000.0
HALF_TOLERANCE = (
    2.0**-10
)  # the features in fp16: a value is off by half a unit in the last of 11 bits, relative


class InProcess:
    """The worker's ASGI application in this process, without HTTP."""

    def __init__(self, root: Path) -> None:
        self._log = logging.getLogger("tableside")
        self._level_before = self._log.level
        self.app = Application(ServerSettings.model_validate({"models": ("demo",), "root": root}))

    async def __aenter__(self) -> "InProcess":
        self._log.setLevel(logging.CRITICAL)  # refusals are what is asked for
        self._ended, started = asyncio.Event(), asyncio.Event()
        first = True

        async def receive() -> dict[str, Any]:
            nonlocal first
            if not first:
                await self._ended.wait()
            message = {"type": "lifespan.startup" if first else "lifespan.shutdown"}
            first = False
            return message

        async def send(message: Any) -> None:
            assert message["type"] in ("lifespan.startup.complete", "lifespan.shutdown.complete"), message
            started.set()

        self._life = asyncio.create_task(self.app({"type": "lifespan"}, receive, send))
        await started.wait()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ended.set()
        await self._life
        self._log.setLevel(self._level_before)

    async def ask(self, case: Case) -> tuple[int, dict[bytes, bytes], bytes]:
        """(status, headers, body); raises what leaves the application."""
        status, headers, parts = 0, dict[bytes, bytes](), list[bytes]()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": case.body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers_ = message["status"], message["headers"]
                headers.update(headers_)
            else:
                parts.append(bytes(message.get("body", b"")))

        length = (
            [] if case.header_length is None else [(b"inference-header-content-length", case.header_length)]
        )
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
        }
        scope |= {
            "path": case.path,
            "raw_path": case.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": length,
            HOLD: (hold := Hold(self.app.in_flight)),
        }
        try:
            await self.app(scope, receive, send)
        finally:
            hold.release()
        return status, headers, b"".join(parts)


class Fuzz:
    """Counts over the cases in process; `details` say how to see a wrong one again."""

    def __init__(self, seed: int) -> None:
        self.seed, self.cases, self.answered, self.crashed, self.failed, self.wrong = seed, 0, 0, 0, 0, 0
        self.details: list[str] = []

    async def run(self, root: Path, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with InProcess(root) as application:
            while self.cases == 0 or time.monotonic() < end:
                for number in range(self.cases, self.cases + CASES_A_TURN):
                    await self._one(application, number)
                self.cases += CASES_A_TURN

    async def _one(self, application: InProcess, number: int) -> None:
        chance = random_of(self.seed, "fuzz", number)
        case = (right_v2 if chance.random() < 0.8 else right_v1)(chance)
        is_right = chance.random() < 0.2
        case = case if is_right else mutated(case, chance)
        try:
            status, headers, body = await application.ask(case)
        except Exception as error:  # noqa: BLE001  (whatever leaves the application is what this looks for)
            self.crashed += 1
            self._tell(number, f"{error!r}", case)
            return
        self.answered += status == 200
        if status == 200:
            self._compare(number, case, headers, body)
        elif is_right or not 400 <= status < 500 or list(json.loads(body)) != ["error"]:
            self.failed += 1
            self._tell(number, f"{status} {body[:200]!r}", case)

    def _compare(self, number: int, case: Case, headers: dict[bytes, bytes], body: bytes) -> None:
        try:
            expected = answer_of(case)
        except Unclear as unclear:
            self.wrong += 1
            self._tell(number, f"answered, though the reference says: {unclear}", case)
            return
        if not same(decoded(headers, body), expected):
            self.wrong += 1
            self._tell(number, "the vectors differ from the reference", case)

    def _tell(self, number: int, what: str, case: Case) -> None:
        self.details.append(
            f"seed {self.seed} case {number}: {what}: {case.path} {case.header_length!r} {case.body[:300]!r}"
        )


def decoded(headers: dict[bytes, bytes], body: bytes) -> Vectors:
    """The vectors of a V2 or v1 answer."""
    if b'"vectors"' in body[:200]:
        return {name: np.array(rows, np.float64) for name, rows in json.loads(body)["vectors"].items()}
    length = headers.get(b"inference-header-content-length")
    version, found = wire.decode(None if length is None else length.decode(), body)
    assert version == 1
    return {name: array.astype(np.float64) for name, array in found.items()}


def same(found: Vectors, expected: Vectors) -> bool:
    """Whether an answer has these features and vectors, up to rounding; values that overflow fp16 are not
    compared."""
    return list(found) == list(expected) and all(
        _close(found[name], vectors) for name, vectors in expected.items()
    )


def _close(found: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    if found.size != expected.size:
        return False
    fits = np.abs(expected) < FP16_MAX
    atol = 1e-3 + 1e-6 * np.abs(expected).max(initial=0.0)
    return np.allclose(found.reshape(expected.shape)[fits], expected[fits], rtol=HALF_TOLERANCE, atol=atol)


# ---- over sockets ----


@dataclass
class Scripts:
    """Counts over scripts of raw bytes, one a connection."""

    sent: int = 0
    wrong: int = 0
    short: int = 0
    failed: int = 0

    def count(self, seed: int, number: int, script: raw_cases.Script, data: bytes) -> None:
        self.sent += 1
        self.failed += b"HTTP/1.1 5" in data and b"HTTP/1.1 501" not in data
        found: list[raw_cases.Answer]
        try:
            found = raw_http.answers(data)
            is_right = raw_http.is_right(script, found)
        except ValueError as error:
            found, is_right = [str(error)], False
        self.short += is_right and raw_http.is_short(script, found)
        if not is_right:
            self.wrong += 1
            print(
                f"requests: seed {seed} sockets {number}: {script.name}: {found}, expected {script.expected}",
                flush=True,
            )


def run_scripts(port: int, seconds: float, seed: int) -> Scripts:
    """Scripts over some connections at once: one that is refused takes a second, in which its answer
    arrives."""
    end, counts, lock = time.monotonic() + seconds, Scripts(), Lock()

    def lane(first: int) -> None:
        for number in count(first, CONNECTIONS):
            chance = random_of(seed, "sockets", number)
            script = raw_cases.script_of(chance)
            data = raw_http.send(port, script, chance)
            with lock:
                counts.count(seed, number, script, data)
            if time.monotonic() > end:
                return

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(lane, range(CONNECTIONS)))
    return counts


def run_schemathesis(url: str, seconds: float, seed: int, files: Path) -> dict[str, float]:
    """Cases from /openapi.json, as many as fit into the time. RuntimeError: schemathesis is not installed, or
    does not run.

    Its time begins before it has read the schema. On a machine with other work a short one ends without a
    case: it has more then.
    """
    if importlib.util.find_spec("schemathesis") is None:
        raise RuntimeError(
            "the requests campaign needs schemathesis, which is not installed: pip install '.[dev]'"
        )
    found = _cases_of_schemathesis(url, seconds, seed, files)
    while not found["test_cases"]["generated"] and seconds < LONGEST_START_S:
        seconds *= 2
        found = _cases_of_schemathesis(url, seconds, seed, files)
    for failure in [*found["failures"], *found["errors"]][:10]:
        print(f"requests: schemathesis, seed {seed}: {json.dumps(failure)[:500]}", flush=True)
    unread = found["warnings"]["unresolvable_reference"]
    if unread:
        print(
            f"requests: /openapi.json has references that cannot be resolved, in {', '.join(unread)}",
            flush=True,
        )
    cases = found["test_cases"]
    return {
        "schemathesis cases": cases["generated"],
        "schemathesis failures": cases["with_failures"] + cases["errored"],
        "operations that /openapi.json describes with broken references": len(unread),
    }


def _cases_of_schemathesis(url: str, seconds: float, seed: int, files: Path) -> dict[str, Any]:
    """The report of one run."""
    report = files / "schemathesis.json"
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{url}/openapi.json",
        "--seed",
        str(seed),
        "--no-color",
    ]
    command += [
        "--phases",
        "coverage,fuzzing",
        "--checks",
        "not_a_server_error",
        "--continue-on-failure",
        "--no-shrink",
    ]
    command += [
        "--max-examples",
        "1000000",
        "--max-time",
        f"{max(1, round(seconds))}",
        "--generation-database",
        "none",
    ]
    command += ["--report", "json", "--report-json-path", str(report)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=files, timeout=seconds + 120, check=False
    )
    if not report.exists():
        raise RuntimeError(f"schemathesis did not run: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign. RuntimeError: schemathesis is not installed."""
    with folders() as (root, files):
        publish(root, files, VALUE)
        fuzz = Fuzz(seed)
        asyncio.run(fuzz.run(root, seconds * SHARES["in process"]))
        for detail in fuzz.details[:20]:
            print(f"requests: {detail}", flush=True)
        with local_server(["demo"], root=root, workers=1) as server:
            over_sockets = _over_sockets(server, root, files, seconds, seed)
    return {
        "cases in process": fuzz.cases,
        "answered of them": fuzz.answered,
        "exceptions": fuzz.crashed,
        "wrongly refused": fuzz.failed,
        "wrongly answered": fuzz.wrong,
        **over_sockets,
    }


def _over_sockets(
    server: LocalServer, root: Path, files: Path, seconds: float, seed: int
) -> dict[str, float]:
    """The parts that need a server; it must be the same worker after them, with no more descriptors."""
    port = int(urlsplit(server.url).port or 0)
    run_scripts(port, 0, seed)  # what a first request opens is no leak
    workers = SameWorkers(server, root)
    scripts = run_scripts(port, seconds * SHARES["sockets"], seed)
    cases = run_schemathesis(server.url, seconds * SHARES["schemathesis"], seed, files)
    return {
        "raw sockets": scripts.sent,
        "raw: other answers than requests": scripts.wrong,
        "raw: right requests unanswered before a wrong one": scripts.short,
        "raw: answers of 500 and above": scripts.failed,
        **cases,
        **workers.figures(),
    }


if __name__ == "__main__":
    standalone(run)
