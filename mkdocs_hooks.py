"""What the site has beyond the pages: files of the repository that they link to, and every public name.

Called by MkDocs. The pages stay plain Markdown, which reads as well in the repository and in a terminal.
"""

from __future__ import annotations

import ast
import itertools
import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent
_LINK = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")
_FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)")
_log = logging.getLogger("mkdocs.hooks.shardwise")
_NAMES = re.compile(r"^<!-- every name of (shardwise[\w.]*) -->$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside of their folder, under ``repository/``."""
    for page in list(files.documentation_pages()):
        for path, _ in _LINK.findall(page.content_string):
            for file in _files_of(path):
                if (uri := f"repository/{file}") not in files.src_uris:
                    files.append(File.generated(config, uri, content=_shown(file)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links out of the folder to the files beside it, and list the names of a package."""
    markdown = _LINK.sub(lambda found: f"](repository/{_landing(found[1])}{found[2] or ''})", markdown)
    return _NAMES.sub(lambda found: directives(found[1]), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Complain of a page that has its reader's browser fetch something from elsewhere."""
    if found := _FETCHED.findall(output):
        _log.warning(f"{page.file.src_uri}: its reader would fetch {', '.join(found)}")
    return output


def directives(package: str) -> str:
    """One for each name in the stub of a package or a module, those of one module together, in its order."""
    path = ROOT / "src" / package.replace(".", "/")
    file = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
    stub = ast.parse(file.read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    lines: list[str] = []
    for module, nodes in itertools.groupby(imports, lambda node: str(node.module)):
        for alias in (alias for node in nodes for alias in node.names):
            if module != "shardwise":  # a package of its own, which has its own list
                lines.append(f"::: {package}.{alias.name}\n")
    return "\n".join(lines)


def _files_of(path: str) -> list[str]:
    """A file, or those of a folder, from the root of the repository; with a page of the folder's own."""
    place = ROOT / path
    if not place.is_dir():
        return [f"{path}.md" if place.suffix != ".md" else path]
    return [f"{path.rstrip('/')}.md"]


def _landing(path: str) -> str:
    return _files_of(path)[0]


def _shown(file: str) -> str:
    """A page of the repository as it is; anything else as a page that shows it."""
    if (ROOT / file).is_file():
        return (ROOT / file).read_text("utf-8")
    place = ROOT / file.removesuffix(".md")
    parts = sorted(part for part in place.rglob("*") if part.is_file()) if place.is_dir() else [place]
    shown = [f"# {file.removesuffix('.md')}"]
    for part in parts:
        content = part.read_text("utf-8")
        shown.append(f"\n## {part.relative_to(place)}\n" if place.is_dir() else "")
        shown.append(f"~~~~ {part.suffix[1:]}\n{content}\n~~~~\n")
    return "\n".join(shown)
