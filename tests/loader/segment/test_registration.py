"""A segment registered with CUDA. What CUDA answers is played where there is no GPU; with --device cuda:0
it is CUDA itself."""

import fcntl
import gc
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import rows_of, until

from tableside.loader.errors import RegistrationError
from tableside.loader.segment import layout
from tableside.loader.segment.registration import MAPPED, PORTABLE, READ_ONLY, Registration, _one_by_one
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model

pytestmark = pytest.mark.gpu

Publish = Callable[..., Any]
on_gpu = pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="needs a GPU")


class Cudart:
    """Answers like the CUDA runtime, and keeps what it was asked."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, _is_mapped(address)))
        return 0

    def cudaGetLastError(self) -> int:
        self.calls.append(("last error",))
        return self.answer


def _is_mapped(address: int) -> bool:
    return f"{address:x}-" in Path("/proc/self/maps").read_text()


@pytest.fixture(params=[layout.LARGE_PAGES, 0], ids=["one file", "a file a table"])
def segment(publish: Publish, root: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> Segment:
    monkeypatch.setattr(layout, "LARGE_PAGES", request.param)
    publish({"t": rows_of(1000, 32), "u": rows_of(100, 8)})
    return Model(root, "demo").attach()


@pytest.mark.parametrize(
    ("read_only", "flags"), [(True, PORTABLE | MAPPED | READ_ONLY), (False, PORTABLE | MAPPED)]
)
def test_the_whole_segment_is_registered_and_unregistered(
    segment: Segment, read_only: bool, flags: int
) -> None:
    """With the address it is mapped at; undone once, by close or by the last reference, and before it is
    unmapped."""
    cudart, address, size = Cudart(), segment.mapping.address, segment.size
    registration = Registration(segment, "cuda:0", cudart, read_only)
    assert cudart.calls == [("register", address, size, flags)]
    registration.close()
    registration.close()
    assert cudart.calls[1:] == [("unregister", address, True)]


@pytest.mark.drawn(0.5)
def test_it_is_undone_before_the_segment_is_unmapped(publish: Publish, root: Path) -> None:
    publish({"t": rows_of(1000, 32)})
    cudart = Cudart()
    registration = Registration(Model(root, "demo").attach(), "cuda:0", cudart, True)
    address = registration.address
    del registration
    gc.collect()
    until(lambda: cudart.calls[1:] == [("unregister", address, True)], what="the end of the registration")
    until(lambda: not _is_mapped(address), what="the end of the mapping")


@pytest.mark.parametrize(
    ("code", "read_only", "message"),
    [
        (712, True, "this process registered them before; keep that registration, or close it first"),
        (2, True, r"could not be page-locked, the limit is [\w, ]+; raise it \(ulimit -l unlimited"),
        (100, True, "there is no GPU; check nvidia-smi"),
        (35, True, "the driver is older than this CUDA"),
        (801, False, "segments are mapped read-only, and this GPU or driver registers no read-only memory"),
        (304, True, r"\(error 304\); serve with --placement hbm or host"),
    ],
)
@pytest.mark.drawn(6)
def test_refusals_say_what_to_do(segment: Segment, code: int, read_only: bool, message: str) -> None:
    cudart = Cudart(code)
    with pytest.raises(RegistrationError, match=message) as caught:
        Registration(segment, "cuda:0", cudart, read_only)
    assert f"{segment.path}: {segment.size:,} bytes" in str(caught.value)
    assert [call[0] for call in cudart.calls] == [
        "register",
        "last error",
    ]  # which torch would take for its own


def test_no_gpu_is_said(segment: Segment) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(
        RegistrationError, match=r"finds no CUDA device here; check the driver \(nvidia-smi\)"
    ):
        Registration(segment, "cuda:0")


def test_views_lie_in_the_segment(segment: Segment) -> None:
    registration = Registration(segment, "cuda:0", Cudart(), True)
    for offset, size in ((-1, 5), (0, segment.size + 1), (segment.size, 1)):
        with pytest.raises(RegistrationError, match="do not lie in what is registered of the segment"):
            registration.view(offset, size)


def test_files_of_tables_on_a_disk_are_left_out(
    publish: Publish, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies before and behind is registered, each part once; a part that CUDA refuses undoes those
    before it."""
    monkeypatch.setattr(layout, "LARGE_PAGES", 0)
    publish({name: rows_of(1000, 32) for name in "abc"})
    segment, cudart = Model(root, "demo").attach(), Cudart()
    files = {file.table: file.offset for file in segment.files}
    registration = Registration(segment, "cuda:0", cudart, True, without=["b"])
    start, flags = segment.mapping.address, PORTABLE | MAPPED | READ_ONLY
    parts = [(0, files["b"]), (files["c"], segment.size)]
    assert cudart.calls == [("register", start + first, end - first, flags) for first, end in parts]
    assert registration.size == sum(end - first for first, end in parts)
    of = {table.name: table for table in segment.header.tables}
    with pytest.raises(RegistrationError, match="do not lie in what is registered"):
        registration.view(of["b"].offset, of["b"].bytes)
    registration.close()
    assert cudart.calls[2:] == [("unregister", start + first, True) for first, _ in parts]

    def refuses_the_second(address: int, size: int, flags: int) -> int:
        return 0 if address == start else 2

    monkeypatch.setattr(cudart, "cudaHostRegister", refuses_the_second)
    cudart.calls.clear()
    with pytest.raises(RegistrationError, match=f"{registration.size:,} bytes cannot be registered"):
        Registration(segment, "cuda:0", cudart, True, without=["b"])
    assert cudart.calls == [("last error",), ("unregister", start, True)]


HOLD = """
import sys, time
from pathlib import Path
sys.path[:0] = [{top!r}, {here!r}]
from test_registration import Cudart
from tableside.loader.segment.registration import Registration
from tableside.loader.segment.segment import Segment

class Slow(Cudart):
    def cudaHostRegister(self, *arguments):
        print("began", flush=True)
        sys.stdin.readline()
        print("ended", flush=True)
        return 0

print("ready", flush=True)
Registration(Segment(Path({path!r})), "cuda:0", Slow(), True)
"""


def started(code: str, segment: Segment) -> "subprocess.Popen[str]":
    """A process that runs the code, once it says that it is ready."""
    here = Path(__file__).parent
    code = code.format(top=str(here.parent.parent.parent), here=str(here), path=str(segment.path))
    path = os.pathsep.join([str(here.parent.parent / "helpers"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.thorough
@pytest.mark.parametrize("dropped", ["", "import weakref; weakref.finalize(sys, id, kept); del kept"])
def test_the_end_of_a_process_leaves_registrations_to_the_driver(segment: Segment, dropped: str) -> None:
    """A thread in CUDA's call, which comes back when the interpreter is gone, would end it by SIGABRT."""
    code = HOLD.replace("Registration(Segm", "kept = Registration(Segm") + dropped
    code = code.replace(
        "class Slow(Cudart):", "class Slow(Cudart):\n    def cudaHostUnregister(self, at): print('undone')"
    )
    with started(code, segment) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.close()
        # `communicate` would miss what was read ahead with the line before
        assert process.stdout.read() == "began\nended\n"
        assert process.wait() == 0


@pytest.mark.thorough
def test_workers_register_one_by_one(segment: Segment) -> None:
    """A second process waits for the first; where that one is killed, it goes on."""

    first = started(HOLD, segment)
    assert first.stdout and first.stdout.readline() == "began\n"
    second = started(HOLD, segment)
    assert second.stdout and not select.select([second.stdout], [], [], 2)[0]  # it cannot begin
    first.kill()
    first.communicate()
    assert second.communicate("go\n", timeout=300)[0] == "began\nended\n"


def test_nobody_waits_for_ever_for_its_turn(segment: Segment, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever can read a segment can lock it: the turn saves time, so after a while it is gone on without,
    and that is said."""
    held = os.open(segment.path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with _one_by_one(segment, wait_s=0.05):
            assert "is locked for more than 0.05 s; it is registered beside that process" in caplog.text
    finally:
        os.close(held)
    with _one_by_one(segment, wait_s=0.05):
        assert caplog.text.count("is locked") == 1


@on_gpu
def test_a_gpu_reads_the_registered_rows(segment: Segment) -> None:
    """The view is the segment's memory, on the device; the registration lives as long as the view."""
    import tables
    import torch

    registration = Registration(segment, tables.DEVICE)
    views = {t.name: registration.view(t.offset, t.bytes) for t in segment.header.tables}
    other, view = views.pop("u"), views.pop("t")
    assert view.is_cuda and view.data_ptr() == segment.tables["t"].address
    np.testing.assert_array_equal(other.cpu().numpy(), segment.tables["u"].packed.reshape(-1))
    del registration, other
    gc.collect()
    np.testing.assert_array_equal(view.cpu().numpy(), segment.tables["t"].packed.reshape(-1))
    with pytest.raises(RegistrationError, match="registered them before"):
        Registration(segment, tables.DEVICE)
    del view
    gc.collect()
    Registration(segment, tables.DEVICE).close()
    assert torch.zeros(1, device=tables.DEVICE).item() == 0
