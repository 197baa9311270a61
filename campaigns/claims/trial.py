"""Trials: the code behind a claim is taken out of a copy of the tree, and the claim's tests are run there.

Each run has process numbers and a /dev/shm of its own (Linux namespaces, through `unshare`). So a server that a broken supervisor
leaves behind ends with the run, and no segment stays on the machine.
"""

import enum
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from campaigns.claims.entries import TOP, Claim

SHM_BYTES = 8 << 30
# What a deletion that leaves no working program looks like. Such a failure says nothing of the test.
BROKEN = re.compile(r"\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError|UnboundLocalError)\b")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?::\w+)", re.MULTILINE)


class Outcome(enum.Enum):
    """What became of a trial. FAILED and CRASHED are as they should be."""

    FAILED = "fails"  # each test named failed, by itself
    CRASHED = "crashes"  # the one test named ended its process by a signal, as without a check of C code
    SURVIVED = "SURVIVED"  # a test named passed without the code
    BROKEN = "BROKEN"  # the tests could not run, or failed by an import
    HUNG = "HUNG"  # they did not end in time


@dataclass(frozen=True)
class Verdict:
    """The outcome of one trial. told: what pytest printed, or why there was no run."""

    claim: Claim
    outcome: Outcome
    seconds: float
    told: str

    @property
    def is_right(self) -> bool:
        return self.outcome in (Outcome.FAILED, Outcome.CRASHED)


class Tree:
    """A copy of the working tree: what git tracks or would track, and the built extensions. One trial at a time."""

    def __init__(self, folder: Path, device: str = "interpreter") -> None:
        """folder: an empty one, which the copy is written to; "t" and its name is used beside it. device: pytest's `--device`."""
        self.folder, self._device = folder, device
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=TOP,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        built = [str(file.relative_to(TOP)) for room in ("quant", "loader", "serving") for file in (TOP / room).rglob("*.so")]
        for name in filter(None, [*listed, *built]):
            if (TOP / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(TOP / name, folder / name)

    def try_claim(self, claim: Claim, deadline_s: float) -> Verdict:
        """Takes the claim's code out, runs its tests, and puts the code back."""
        started = time.monotonic()
        with self._without(claim):
            if claim.build and (told := self._build(claim)):
                return Verdict(claim, Outcome.BROKEN, time.monotonic() - started, told)
            code, told = self.pytest(claim.tests, deadline_s)
        return Verdict(claim, outcome(claim, code, told), time.monotonic() - started, told)

    def pytest(self, tests: Sequence[str], deadline_s: float, *options: str) -> tuple[int | None, str]:
        """(exit code, output) of pytest over these tests; no exit code where they did not end in time."""
        stop = ["--maxfail=1"] if len(tests) == 1 else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=short",
            "-rfEs",
            f"--device={self._device}",
        ]
        # The shell stays as the first process, as that has to collect the processes whose parents ended.
        first = f'mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm || exit 99; "$@"; exit $?'
        run = [*_unshare(), "sh", "-c", first, "sh", *command, *stop, *options, *tests]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "TMPDIR": str(self._temporary()),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # to import them takes longer than most tests
        }
        with subprocess.Popen(
            run,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        ) as process:
            try:
                told, _ = process.communicate(timeout=deadline_s)
                return process.returncode, told
            except subprocess.TimeoutExpired:
                process.kill()  # unshare; with it goes the first process of the namespace, and so all of them
                return None, process.communicate()[0]

    def _temporary(self) -> Path:
        """An empty folder for the temporary files of a run, of a short name: a socket's path has 107 bytes."""
        folder = self.folder.with_name(f"t{self.folder.name}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    @contextmanager
    def _without(self, claim: Claim) -> Iterator[None]:
        """The tree without the claim's code. Extensions that are compiled meanwhile are replaced by those of before."""
        before = {cut.file: (self.folder / cut.file).read_text() for cut in claim.cuts}
        kept = {file: file.read_bytes() for file in self.folder.rglob("*.so")} if claim.build else {}
        try:
            for cut in claim.cuts:
                file = self.folder / cut.file
                self._write(file, cut.applied_to(file.read_text()))
            yield
        finally:
            for name, text in before.items():
                self._write(self.folder / name, text)
            for file, content in kept.items():
                file.write_bytes(content)

    def _write(self, file: Path, text: str) -> None:
        """Python compares a source with its compiled form by size and second of change alone, so the compiled form goes."""
        file.write_text(text)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def _build(self, claim: Claim) -> str:
        """Compiles the extensions whose sources changed; what the compiler said where it failed."""
        command = [sys.executable, "-m", "campaigns.claims.build", *(cut.file for cut in claim.cuts)]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        run = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        return run.stdout + run.stderr if run.returncode else ""


def outcome(claim: Claim, code: int | None, told: str) -> Outcome:
    """What a trial came to. code: pytest's exit code; told: what it printed."""
    if code is None:
        return Outcome.HUNG
    if code > 128 and claim.build and len(claim.tests) == 1:
        return Outcome.CRASHED
    if code not in (0, 1):
        return Outcome.BROKEN
    failed = set(FAILED.findall(told))
    if any(test.partition("[")[0] not in failed for test in claim.tests):
        return Outcome.SURVIVED
    found = BROKEN.search(told)
    return Outcome.BROKEN if found and found[1] != claim.error else Outcome.FAILED


def _unshare() -> list[str]:
    """The command that runs another one with process numbers and mounts of its own, and users where this one is not root."""
    if shutil.which("unshare") is None:
        raise FileNotFoundError(
            "unshare is not there, and trials run in namespaces of their own (Debian: apt-get install util-linux)"
        )
    user = [] if os.getuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    return ["unshare", *user, "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
