"""Which kind of stream a command names."""

from pathlib import Path

from tableside.serving.follow.folder import FolderSource
from tableside.serving.follow.source import ChangeSource, IsStopping


def open_source(
    text: str, name: str | None, table: str | None, start: str, is_stopping: IsStopping
) -> ChangeSource:
    """A folder's path, or the URL of a Redis stream. name: what the state calls it, None: "folder:PATH" or
    "redis:KEY".

    table: of all rows, where they need not name it; start: "start", "end", or a position, where none is kept.
    SourceError: it is neither. MissingBackend: its client is not installed.
    """
    if "://" in text:
        from tableside.serving.follow.redis_stream import RedisStream, split_url

        _, key = split_url(text)
        return RedisStream(text, name or f"redis:{key}", table, start, is_stopping)
    folder = Path(text)
    return FolderSource(folder, name or f"folder:{folder.resolve()}", table, start, is_stopping)
