"""docs/torch.md: its code runs as it is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import rows_of


def test_the_examples_of_the_documentation(
    root: Path,
    publish: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after another, in the default folder of the commands."""
    features = {
        "clicked": {"table": "items", "pooling": "sum"},
        "bought": {"table": "items", "pooling": "mean"},
        "words": {"table": "items", "pooling": "none"},
    }
    publish({"items": rows_of(50, 8)}, "ads", features=features)
    monkeypatch.setenv("TABLESIDE_ROOT", str(root))
    text = (Path(__file__).parents[3] / "docs" / "torch.md").read_text()
    names: dict[str, Any] = {}
    for block in text.split("```python\n")[1:]:
        exec(compile(block.split("```")[0], "docs/torch.md", "exec"), names)
    assert capsys.readouterr().out == (
        "torch.Size([2, 8])\ntorch.Size([1, 3, 8])\n['clicked'] torch.Size([2, 1])\n"
    )
