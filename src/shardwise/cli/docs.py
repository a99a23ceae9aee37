"""``shardwise docs``: the pages of the documentation, as they were installed."""

from __future__ import annotations

import difflib
import re
import sys
from importlib import resources
from pathlib import Path

import click

from shardwise.cli.launch import fail
from shardwise.errors import ConfigError

PAGES = Path(str(resources.files("shardwise.cli"))) / "pages"
"""The folder `docs` of the sources, which every wheel has a copy of."""

_FIRST = "index"

_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


@click.command("docs")
@click.argument("page", default=_FIRST)
@click.option("--print", "is_place", is_flag=True, help="Print the path of the page, or of all pages.")
@click.option("--list", "is_list", is_flag=True, help="List the pages, each with its title.")
def docs_command(page: str, *, is_place: bool, is_list: bool) -> None:
    """Show a PAGE of the documentation, or where to begin.

    The pages came with the package: no network is needed. What is piped is the Markdown as it is.
    """
    if is_place and page == _FIRST:
        click.echo(PAGES)
        return
    if is_list:
        for each in page_names():
            click.echo(f"{each}\t{title_of(each)}")
        return
    try:
        file = page_file(page)
    except ConfigError as error:
        fail(error)
    if is_place:
        click.echo(file)
    elif sys.stdout.isatty():
        _show(file)
    else:
        click.echo(file.read_text("utf-8"), nl=False)


def page_names() -> list[str]:
    """Of all pages, without their endings."""
    return sorted(path.stem for path in PAGES.glob("*.md"))


def title_of(name: str) -> str:
    """The first heading of a page."""
    lines = (PAGES / f"{name}.md").read_text("utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), name)


def page_file(name: str) -> Path:
    """The file of a page, whose name may be written with its ending, and with hyphens.

    Raises:
        ConfigError: there is none of this name; naming the nearest.
    """
    wanted, known = name.removesuffix(".md").replace("-", "_"), page_names()
    if wanted in known:
        return PAGES / f"{wanted}.md"
    near = difflib.get_close_matches(wanted, known, 1)
    answer = f"; did you mean {near[0]}?" if near else ";"
    raise ConfigError(f"{name!r}: there is no such page{answer} `shardwise docs --list` lists them")


def _show(file: Path) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.capture() as captured:
        console.print(Markdown(_COMMENT.sub("", file.read_text("utf-8")), hyperlinks=False))
    click.echo_via_pager(captured.get())
