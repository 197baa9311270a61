"""Turns: one thread computes at a time, while others wait."""

import threading

from tableside.quant.rows.turns import turn, waiting


def test_one_thread_computes_while_others_wait() -> None:
    """Who comes back waits for its turn. A thread without one does not."""
    lock, came, go, back = threading.Lock(), threading.Event(), threading.Event(), threading.Event()

    def reads() -> None:
        with turn(lock):
            with waiting():
                came.set()
                go.wait()
            back.set()

    with waiting():
        pass
    other = threading.Thread(target=reads)
    other.start()
    came.wait()
    with turn(lock):
        go.set()
        assert lock.locked() and not back.is_set()
        with waiting():
            back.wait()
        assert lock.locked()
    other.join()
    assert not lock.locked()


def test_a_turn_ends_with_an_error() -> None:
    lock = threading.Lock()
    for _ in range(2):
        try:
            with turn(lock), waiting():
                raise KeyError
        except KeyError:
            assert not lock.locked()
