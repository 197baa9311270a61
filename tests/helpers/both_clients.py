"""Either client, for tests of what both do."""

import asyncio
import copy
import inspect
from typing import Any

from tableside.serving.client import AsyncClient, Client


class Both:
    """Either client, with calls that wait: ask(name, *arguments)."""

    def __init__(self, kind: type[Client] | type[AsyncClient], url: str, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = self.loop.run_until_complete(self._make(kind, url, options))

    async def _make(self, kind: Any, url: str, options: Any) -> Any:
        return kind(url, **options)

    def with_options(self, **options: Any) -> "Both":
        other = copy.copy(self)
        other.client = self.client.with_options(**options)
        return other

    def ask(self, name: str, *arguments: Any) -> Any:
        found = getattr(self.client, name)(*arguments)
        return self.loop.run_until_complete(found) if inspect.isawaitable(found) else found

    def close(self) -> None:
        self.ask("close")
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
