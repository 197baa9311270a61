"""Hooks of `make docs` (mkdocs.yml): links of a page that leave docs/ and page names in prose.

A link to a file outside docs/ becomes the file's path from the top of the repository, since the site has no
such page. A file that is not there fails the build, as mkdocs fails on its own links.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_TOP = Path(__file__).parent.parent
_OUTSIDE = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
_PAGE = re.compile(r"(?<![\w/`(\[])docs/([\w-]+\.md)(?![\w`])")  # as prose names pages: docs/gpu.md
_FENCE = re.compile(r"^(```.*?^```|    .*?$)", re.MULTILINE | re.DOTALL)


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
