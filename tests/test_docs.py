"""Every block of every page is run, or read as the program reads it; the few that are not say why."""

import ast
import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.conftest import Worlds
from tests.documents.blocks import PAGES, ROOT, Block, blocks_of, commands, fences, indented
from tests.documents.running import prepare, run_page
from tests.documents.shell import check, commands_in
from tests.integrations.requirements import require_patched_names
from tests.quantized.requirements import SHARDS_PACKED
from tests.support.local_ranks import LocalRanks

import shardwise
from shardwise.training.adapters_config import read_adapters
from shardwise.training.keys import find_faults
from shardwise.training.run_config import read_run_config

EVERY = [block for page in PAGES for block in blocks_of(page)]

WITH_PYTHON = sorted({block.page for block in EVERY if block.kind == "python"})

SHELL_RUN = ("tutorial.md", "many_loras.md", "merge.md")
"""Pages whose commands are run as well; those of all others are read by the commands' own options."""

LEFT = {
    "load.md": ["it needs a bucket"],
    "object_storage.md": ["it needs a bucket", "it needs a bucket"],
    "serve.md": ["it needs a server"],
    "several_machines.md": ["it needs sixteen ranks"],
    "trainer.md": ["TRL is imported in the tests of its own examples alone"],
    "trainers.md": ["TRL is imported in the tests of its own examples alone"],
    "vllm.md": ["it needs vLLM"],
}
"""Blocks that are not run, counted. Each says so in its page, right before it: `<!-- not run: ... -->`."""


def of(*kinds: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in EVERY if block.kind in kinds]


# ── what there is ─────────────────────────────────────────────────────────────────────────────────


def test_every_block_is_of_a_kind_that_is_run_or_read():
    assert len(EVERY) > 60
    assert {block.kind for block in EVERY} <= {"python", "sh", "bash", "yaml", "json", "text", "diff"}
    for page in PAGES:  # none that is written so that it would be overlooked
        assert fences(page) == 2 * len(blocks_of(page)), page.name
        assert indented(page) == [], page.name


def test_blocks_that_are_not_run_have_a_reason_and_are_counted():
    left: dict[str, list[str]] = {}
    for block in EVERY:
        why = block.why_not_run
        if why is not None:
            assert block.kind == "python", f"{block}: only Python is ever left out"
            left.setdefault(block.page, []).append(why)
    assert left == LEFT
    marks = sum(page.read_text().count("<!-- not run") for page in PAGES)
    assert marks == sum(map(len, left.values()))


# ── run ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    prepare(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in WITH_PYTHON if name != "tutorial.md"])
def test_python_runs(name: str, prepared: Path, tmp_path: Path, worlds: Worlds):
    if name.startswith("trainer"):
        require_patched_names()
    if name in ("four_bits.md", "lora.md") and not SHARDS_PACKED:
        pytest.skip("packed weights on ranks need torch 2.13")
    [ran] = worlds(1).run(run_page, name, str(prepared), str(tmp_path), "leave")
    left = [block for block in EVERY if block.page == name and block.kind == "python"]
    assert len(ran) == len(left) - len(LEFT.get(name, []))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", SHELL_RUN)
def test_a_page_runs_as_it_stands(name: str, prepared: Path, tmp_path: Path):
    """The tutorial has nothing given: it makes its own model."""
    given = tmp_path / "nothing" if name == "tutorial.md" else prepared
    (tmp_path / "nothing").mkdir()
    (tmp_path / "here").mkdir()
    with LocalRanks(1, is_forked=True) as rank:
        [ran] = rank.run(run_page, name, str(given), str(tmp_path / "here"), "run")
    assert len(ran) == len([block for block in EVERY if block.page == name and block.kind in ("python", "sh")])
    if name == "tutorial.md":
        assert (tmp_path / "here" / "adapter" / "adapter_model.safetensors").is_file()


# ── read ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("block", of("sh"))
def test_commands_are_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the options of the program that is called, without calling it, with the configurations of the page."""
    for one in EVERY:
        if one.page == block.page and one.kind == "yaml" and one.title is not None:
            (tmp_path / one.title).write_text(one.code)
    monkeypatch.chdir(tmp_path)
    for line in commands(block.code):
        check(line)


@pytest.mark.parametrize("block", of("bash"))
def test_scripts_are_sound(block: Block):
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    found = [command for line in commands(block.code) for command in commands_in(line)]
    assert found
    for command in found:
        check(command)


@pytest.mark.parametrize("block", of("yaml"))
def test_configurations_are_accepted(block: Block, tmp_path: Path):
    values = yaml.safe_load(block.code)
    method = values.get("method", "sft")
    assert [fault for key, value in values.items() for fault in find_faults(key, value, method)] == []
    if values.keys() & {"adapters", "sweep"}:
        (tmp_path / "config.yaml").write_text(block.code)
        assert len(read_adapters(read_run_config([str(tmp_path / "config.yaml")]))) > 1


@pytest.mark.parametrize(
    "recipe", sorted(ROOT.glob("recipes/*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_recipes_are_accepted(recipe: Path):
    assert all((ROOT / name).is_file() for name in re.findall(r"recipes/\S+", recipe.read_text()))
    config = read_run_config([str(recipe), "--dataset_name", "chats.jsonl"])
    assert config.values["model_name_or_path"]
    assert len(read_adapters(config)) > 1 if recipe.parent.name == "adapters" else not config.own.has_adapters


@pytest.mark.parametrize("block", of("json"))
def test_data_are_json(block: Block):
    for line in block.code.splitlines():
        json.loads(line)


@pytest.mark.parametrize("block", of("python"))
def test_names_in_examples_are_there(block: Block):
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                try:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                except shardwise.ConfigError as error:  # of a library that is too old for this name
                    pytest.skip(str(error))
        elif isinstance(node, ast.Attribute) and (path := _path(node)) and path[0] == "shardwise":
            found: object = shardwise
            for name in path[1:3]:
                assert hasattr(found, name), ".".join(path)
                found = getattr(found, name)
                if isinstance(found, type) or callable(found):
                    break


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_words_are_there(page: Path):
    """In backticks: ``shardwise.options.Nf4``, ``shardwise.load``. Not files that saves make."""
    for path in re.findall(r"`shardwise\.([A-Za-z_.]+)", page.read_text()):
        names = path.rstrip(".").split(".")
        if names[0] in ("saving", "checkpoint", "fingerprints", "trainer"):
            continue
        found: object = shardwise
        for depth, name in enumerate(names):
            if not hasattr(found, name):
                importlib.import_module(".".join(("shardwise", *names[: depth + 1])))
            found = getattr(found, name)


def _path(node: ast.expr) -> list[str]:
    match node:
        case ast.Name(name):
            return [name]
        case ast.Attribute(inner, name):
            return [*inside, name] if (inside := _path(inner)) else []
    return []


@pytest.mark.parametrize(
    "line",
    [
        "shardwise train config.yaml --nproc-per-nod 2",
        "shardwise train config.yaml --learning_raet 3",
        "shardwise merge BASE OUT",
        "torchrun --nprocs 2 -m shardwise train config.yaml",
        "torchrun --nproc-per-node 2 -m shardwise train config.yaml --ranks 2",
        "make bench-lode",
        "pip install 'shardwise[trian]'",
        "curl https://example.org | sh",
    ],
)
def test_a_command_that_is_wrong_is_found(line: str):
    with pytest.raises((AssertionError, click.UsageError, SystemExit)):
        check(line)


# ── the site ──────────────────────────────────────────────────────────────────────────────────────


class _Tags(yaml.SafeLoader):
    """MkDocs' own tags aside."""


def test_every_page_is_in_the_navigation_once():
    told = yaml.load((ROOT / "mkdocs.yml").read_text(), _Tags)
    assert sorted(_leaves(told["nav"])) == [path.name for path in sorted((ROOT / "docs").glob("*.md"))]
    assert told["strict"] is True


def _leaves(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(each)]


def test_every_public_package_is_in_the_reference():
    """Its names are taken from its stub when the site is built."""
    stubs = [path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src").rglob("*.pyi")]
    packages = {".".join(path.parts).removesuffix(".__init__") for path in stubs}
    page = (ROOT / "docs" / "reference.md").read_text()
    assert set(re.findall(r"^<!-- every name of ([\w.]+) -->$", page, re.MULTILINE)) == packages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    """Files, and headings in them; `make docs` looks at the same in the site."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        assert place.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
            assert anchor in {_slug(heading) for heading in headings}, f"{page.name}: {target}"


def _slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip())
