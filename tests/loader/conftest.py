"""What tests of tables in files of their own share."""

import pytest

from tableside.loader.segment import layout


@pytest.fixture
def every_table_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGE_PAGES", 0)
