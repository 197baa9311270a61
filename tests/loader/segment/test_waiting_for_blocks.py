"""Rows that a disk does not bring in time, and a disk that hangs (loader.segment.blocks)."""

import os
import time
import weakref
from typing import Any

import numpy as np
import pytest
from block_files import HOUR, File

from tableside.loader.segment import _blocks
from tableside.loader.segment.blocks import Breaker
from tableside.quant.rows.fetched import RowState

STATE = 9  # among the arguments of `_blocks.in_threads`


def none_comes(*given: Any) -> None:
    """Threads that a disk holds up."""
    given[STATE][given[STATE] == 3] = RowState.LATE


def test_rows_that_do_not_come_in_time_are_late(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those that the page cache did not have."""
    fetch = _blocks.fetch

    def half(*given: Any) -> int:
        *_, state, is_ready = given
        if is_ready:  # as if a disk had to bring the other half
            state[1::2] = RowState.HERE
            left = fetch(*given)
            state[1::2] = 3
            return left + 1
        return fetch(*given)

    monkeypatch.setattr(_blocks, "fetch", half)
    rows, reader = np.arange(0, 1000, 60), file.reader()
    out, state = np.zeros((rows.size, 80), np.uint8), np.zeros(rows.size, np.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(_blocks, "in_threads", none_comes)
        reader(rows, out, state, time.monotonic())
    assert set(state[1::2]) == {RowState.LATE} and set(state[::2]) == {RowState.HERE}
    np.testing.assert_array_equal(out[::2], file.rows[rows[::2]])
    for deadline in (None, time.monotonic() + HOUR):
        reader(rows, out, state, deadline)
        assert not state.any()
        np.testing.assert_array_equal(out, file.rows[rows])


def test_who_does_not_wait_leaves_the_threads_to_it(file: File) -> None:
    """Rows of a part come, all of them and whole, or are late. A thread that goes on keeps the file open."""
    reader = file.reader()
    where, device, kept = reader._where, reader._device, weakref.ref(reader)
    rows, late = np.arange(1000), 0
    for depth, parts in ((0, 1), (0, 7), (4, 3), (4, 1000)) * 20:
        out, state = np.zeros((1000, 80), np.uint8), np.full(1000, 3, np.uint8)
        state[500] = RowState.CORRUPT  # which nobody asks for
        _blocks.in_threads(reader, device, parts, 0, *where, rows, out, state, depth, HOUR, HOUR)
        assert {*state.tolist()} <= {RowState.HERE, RowState.LATE, RowState.CORRUPT}
        here = state == RowState.HERE
        np.testing.assert_array_equal(out[here], file.rows[here])
        assert not out[~here].any() and state[500] == RowState.CORRUPT
        late += np.count_nonzero(state == RowState.LATE)
    assert late
    del reader
    other = file.reader()
    while kept() is not None:  # another call lets go of what has ended
        other(rows[:9], out[:9], state[:9], time.monotonic() + HOUR)
        _blocks.in_threads(other, device, 1, -1, *where, rows[:0], out[:0], state[:0], 0, 0, 0)


def test_a_fork_has_threads_of_its_own(file: File) -> None:
    reader, rows = file.reader(), np.arange(0, 1000, 60)
    out, state = np.zeros((rows.size, 80), np.uint8), np.zeros(rows.size, np.uint8)

    def read() -> bool:
        state[:], out[:] = 3, 0
        _blocks.in_threads(reader, reader._device, 3, -1, *reader._where, rows, out, state, 0, 0, 0)
        return not state.any() and np.array_equal(out, file.rows[rows])

    assert read()
    if not (child := os.fork()):
        os._exit(0 if read() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and read()


@pytest.mark.parametrize(
    ("parts", "limits"), [(0, (0, 0, 0, 0)), (1, (-2, 0, 0, 0)), (1, (0, -1, 0, 0)), (1, (0, 4, -1, 0))]
)
def test_waits_that_make_no_sense_are_refused(file: File, parts: int, limits: tuple[int, ...]) -> None:
    reader, out, state = file.reader(), np.zeros((1, 80), np.uint8), np.full(1, 3, np.uint8)
    with pytest.raises(ValueError, match="in_threads: a limit is negative, or there is no part"):
        where = *reader._where, np.array([3]), out, state
        _blocks.in_threads(reader, reader._device, parts, limits[0], *where, *limits[1:])


def test_nobody_waits_for_a_disk_that_hangs(
    file: File, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows in the page cache are still read; the others are late at once. One request at a time looks whether
    it reads again."""
    now, asked = [100.0], list[int]()

    def hang(*given: Any) -> None:
        asked.append(given[STATE].size)
        now[0] += 0.7

    reader, fetch = file.reader(), _blocks.fetch
    reader._breaker = Breaker(lambda: now[0])
    reader._name = "this table"
    rows, out, state = np.array([3, 500]), np.zeros((2, 80), np.uint8), np.zeros(2, np.uint8)

    def half(*given: Any) -> int:
        if given[-1]:  # as if a disk had to bring the second row
            state = given[-2]
            state[1] = RowState.HERE
            fetch(*given)
            state[1] = 3
            return 1
        return fetch(*given)

    with monkeypatch.context() as patched:
        patched.setattr(_blocks, "fetch", half)
        patched.setattr(_blocks, "in_threads", hang)
        patched.setattr("time.monotonic", lambda: now[0])
        for n in range(6):
            reader(rows, out, state, now[0] + 0.6)
            assert state.tolist() == [RowState.HERE, RowState.LATE]
            assert len(asked) == min(n + 1, 2)  # two waited 0.7 s each, and none since
        now[0] += 1.1
        reader(rows, out, state, now[0] + 0.4)  # who hardly waits does not look
        reader.ask(rows)
        assert len(asked) == 2 and state.tolist() == [RowState.HERE, RowState.LATE]
        for _ in range(2):
            reader(rows, out, state, now[0] + 0.6)
        assert len(asked) == 3
        patched.setattr(_blocks, "in_threads", lambda *given: fetch(*given[4:10], False))
        now[0] += 1.1
        for _ in range(2):
            reader(rows, out, state, now[0] + 0.6)
            assert not state.any()
    assert [r.getMessage() for r in caplog.records] == [
        "this table: no row came from the disk for 1.4 s; requests do not wait for it",
        "this table: rows come from the disk again",
    ]


@pytest.mark.parametrize(("timeout_s", "least"), [(2.0, 0.5), (1.0, 0.5), (0.2, 0.1)])
def test_who_hardly_waits_does_not_say_that_a_disk_hangs(
    file: File, monkeypatch: pytest.MonkeyPatch, timeout_s: float, least: float
) -> None:
    """Less than half of what others wait, or of a second; rows that came are told all the same."""
    now, told = [100.0], list[tuple[int, int]]()
    reader = file.reader()
    reader.timeout_s, reader._breaker = timeout_s, Breaker(lambda: now[0])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(reader._breaker, "told", lambda began, came, late: told.append((came, late)))
    rows, out, state = np.array([3, 500]), np.zeros((2, 80), np.uint8), np.zeros(2, np.uint8)

    def late(*given: Any) -> None:
        given[STATE][0] = RowState.HERE
        now[0] += timeout_s

    monkeypatch.setattr(_blocks, "fetch", lambda *given: 2)
    monkeypatch.setattr(_blocks, "in_threads", late)
    for wait in (0.99 * least, 1.01 * least, timeout_s):
        reader(rows, out, state, now[0] + wait)
        assert state.tolist() == [RowState.HERE, RowState.LATE]
    assert told == [(1, 0), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    "waits",
    [
        [(0, 1, 5, 0)],  # a row came
        [(0, 0.4, 0, 5), (0.4, 0.8, 0, 5)],  # it is too soon
        [(0, 0.8, 0, 5), (1, 1.1, 1, 5), (1.1, 1.9, 0, 5)],  # one came between
        [(0, 0.1, 0, 5), (50, 50.1, 0, 5)],  # nobody waited meanwhile
    ],
    ids=["came", "soon", "some", "seldom"],
)
def test_a_slow_disk_does_not_hang(waits: list[tuple[float, float, int, int]]) -> None:
    """waits: (began, ended, rows that came, rows that were late)."""
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    for began, ended, came, late in waits:
        now[0] = ended
        assert breaker.told(began, came, late) == "" and not breaker.is_open()


def test_a_disk_that_hangs_is_noticed_within_a_second() -> None:
    """By requests that wait for a tenth of one, one after another."""
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    for tenth in range(9):
        assert not breaker.is_open()
        now[0] = 50 + 0.1 * tenth + 0.105
        breaker.told(50 + 0.1 * tenth, 0, 5)
    assert breaker.is_open() and now[0] < 51


def test_who_looks_whether_a_disk_reads_again_waits_half_a_second(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one a second after that: a batch holds up all of its requests."""
    now, began, waited = [0.0], list[float](), list[float]()
    reader = file.reader()
    reader._breaker = breaker = Breaker(lambda: now[0])

    def late(*given: Any) -> None:
        began.append(now[0])
        waited.append(given[3] / 1000)  # wait_ms
        now[0] += waited[-1]

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(_blocks, "fetch", lambda *given: 2)
    monkeypatch.setattr(_blocks, "in_threads", late)
    rows, out, state = np.array([3, 500]), np.zeros((2, 80), np.uint8), np.zeros(2, np.uint8)
    for _ in range(2):
        reader(rows, out, state, now[0] + 2.0)
    assert breaker.hangs and waited == pytest.approx([2.0], abs=0.01)
    for _ in range(3):
        for passed in (0.7, 0.35, 0.0):
            now[0] += passed
            reader(rows, out, state, now[0] + 2.0)
    assert waited == pytest.approx([2.0, 0.5, 0.5, 0.5], abs=0.01)
    assert began == pytest.approx([0.0, 3.05, 4.6, 6.15], abs=0.05)


def test_a_kept_row_is_read_once(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where its block is damaged; one that did not come is tried again."""
    reader = file.reader()
    file.write(60 * 80 + 7, bytes([file.rows[60, 7] ^ 4]))
    with monkeypatch.context() as patched:
        patched.setattr(_blocks, "fetch", lambda *given: 1)
        patched.setattr(_blocks, "in_threads", none_comes)
        assert reader.kept(5) is None
    reader._breaker = Breaker()
    for _ in range(2):
        np.testing.assert_array_equal(reader.kept(5), file.rows[5])
        assert reader.kept(60, 60.0) is None
    monkeypatch.setattr(_blocks, "fetch", lambda *given: pytest.fail("it is kept"))
    np.testing.assert_array_equal(reader.kept(5), file.rows[5])


def test_files_of_a_disk_share_what_is_known_of_it(file: File) -> None:
    assert file.reader()._breaker is file.reader()._breaker
