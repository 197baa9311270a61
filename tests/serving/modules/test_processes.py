"""Several processes with a module each: rows that all of them read lie in memory once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from holding import ends, everything
from process_memory import memory_together
from support import rows_of

ROWS, DIM = 500_000, 32  # 64 MB in fp32
SLACK_BYTES = 4 << 20  # pages of the process itself that are shared memory too


@pytest.mark.thorough
def test_two_processes_share_every_row(root: Path, publish: Callable[..., Any]) -> None:
    """Each has read every row, both together hold them once, and none has a copy of its own."""
    publish({"t": rows_of(ROWS, DIM)}, "ads", {"t": "fp32"}, {"s": {"table": "t", "pooling": "sum"}})
    table = ROWS * DIM * 4
    (alone,) = memory_together(everything, (str(root), "ads", True), 1)
    together = memory_together(everything, (str(root), "ads", True), 2)
    (without,) = memory_together(everything, (str(root), "ads", False), 1)
    assert table <= alone["pss_shmem"] <= table + SLACK_BYTES
    assert table <= sum(found["pss_shmem"] for found in together) <= table + SLACK_BYTES
    for found in together:
        assert found["pss_shmem"] <= table / 2 + SLACK_BYTES
        assert (
            found["private"] - without["private"] <= table / 2
        )  # buffers of lookups and their kernel, not the rows


@pytest.mark.thorough
def test_a_process_that_ends_is_said() -> None:
    """Nobody waits for it, and the others go."""
    with pytest.raises(RuntimeError, match="a process of ends ended before its memory was measured"):
        memory_together(ends, (3,), 2)
