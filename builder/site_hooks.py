"""Hooks of `make docs` (mkdocs.yml): links of a page that leave docs/, page names in prose, and the package.

A link to a file outside docs/ becomes the file's path from the top of the repository, since the site has no
such page. A file that is not there fails the build, as mkdocs fails on its own links. The API reference reads
`tableside` where the rooms lie inside it, as in a wheel: build/types links them, as for `make check`.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_TOP = Path(__file__).parent.parent
_OUTSIDE = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
_PAGE = re.compile(r"(?<![\w/`(\[])docs/([\w-]+\.md)(?![\w`])")  # as prose names pages: docs/gpu.md
_FENCE = re.compile(r"^(```.*?^```|    .*?$)", re.MULTILINE | re.DOTALL)


def on_startup(**_: Any) -> None:
    """Links the package's files and rooms."""
    package = _TOP / "build" / "types" / "tableside"
    package.mkdir(parents=True, exist_ok=True)
    for path in (*_TOP.glob("tableside/*.py"), *(_TOP / room for room in ("quant", "loader", "serving"))):
        if not (link := package / path.name).is_symlink():
            link.symlink_to(path)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text with links that the site can follow. PluginError: a file that it links to is not
    there."""

    def outside(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = (_TOP / "docs" / target).resolve()
        if not path.exists():
            raise PluginError(f"{page.file.src_path}: {target} is not there")
        name = str(path.relative_to(_TOP))
        return f"`{name}`" if text in (name, path.name, target) else f"{text} (`{name}`)"

    def linked(text: str) -> str:
        return _PAGE.sub(r"[docs/\1](\1)", _OUTSIDE.sub(outside, text))

    parts = _FENCE.split(markdown)
    return "".join(part if n % 2 else linked(part) for n, part in enumerate(parts))
