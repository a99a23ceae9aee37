"""Blocks of code in pages, and the reasons why some are not run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+?) -->\n)?"
    r"```(?P<kind>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block between fences. What has no kind is for the shell, as the pages have it."""

    page: str
    number: int
    kind: str
    code: str
    title: str | None
    """The file that a reader is told to save it as."""
    why_not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks_of(page: Path) -> list[Block]:
    """In their order."""
    return [
        Block(page.name, number, found["kind"] or "sh", found["code"], found["title"], found["why"])
        for number, found in enumerate(_BLOCK.finditer(page.read_text("utf-8")))
    ]


def fences(page: Path) -> int:
    """Lines that begin or end a block, however these are written."""
    return len(re.findall(r"^\s*(?:```|~~~)", page.read_text("utf-8"), re.MULTILINE))


def indented(page: Path) -> list[str]:
    """Lines of code that Markdown would take for a block, outside of fences and lists."""
    plain = _BLOCK.sub("", page.read_text("utf-8"))
    return re.findall(r"\n\n    (\S[^\n]*)", plain)


def commands(script: str) -> Iterator[str]:
    """Lines of a shell script, those that go on put together, without the empty ones."""
    for line in re.sub(r"\\\n\s*", "", script).splitlines():
        if line.strip() and not line.strip().startswith("#"):
            yield line.strip()
