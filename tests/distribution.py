"""``make dist``: builds what is published, looks into it, and uses it as somebody would who installed it."""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).parent.parent


def require(there: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Exit where something is not there."""
    lacking = sorted(set(wanted) - set(there))
    if lacking:
        sys.exit(f"{what} lacks {', '.join(lacking)}")


def sources() -> set[str]:
    """What a package has to hold: modules, data, and the mark that it is typed."""
    kinds = ("*.py", "*.pyi", "py.typed", "*.json", "*.yaml")
    return {path.relative_to(ROOT / "src").as_posix() for kind in kinds for path in (ROOT / "src").rglob(kind)}


def look_at_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = (opened.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        (entries,) = (opened.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    require(names, sources(), wheel.name)
    others = [name for name in names if not name.startswith(("shardwise/", "shardwise-"))]
    if others:
        sys.exit(f"{wheel.name} holds what is not of the package: {', '.join(others)}")
    require(metadata.splitlines(), ["License-Expression: Apache-2.0", "Requires-Python: >=3.11"], "its metadata")
    require([name.rpartition("/")[2] for name in names], ["LICENSE"], wheel.name)
    require(entries.splitlines(), ["shardwise = shardwise.cli:main"], "its entry points")


def look_at_archive(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
    docs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    wanted = {f"src/{name}" for name in sources()} | docs
    require(names, wanted | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}, archive.name)
    caches = [name for name in names if "__pycache__" in name or name.startswith((".", "fuzz-found"))]
    if caches:
        sys.exit(f"{archive.name} holds {', '.join(caches[:5])}")


def use(wheel: Path) -> None:
    """Install it into a folder of its own, and have its command look at a checkpoint, and show a page."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder]
        subprocess.run([*pip, str(wheel)], check=True)
        code = (
            f"import shardwise; assert shardwise.__file__.startswith({folder!r}), shardwise.__file__\n"
            "from shardwise.cli import main\n"
            f"main(['inspect', {str(ROOT / 'tests/fixtures/files/2/model')!r}], standalone_mode=False)\n"
            "main(['docs', 'architecture'])"
        )
        environment = {**os.environ, "PYTHONPATH": folder}
        told = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
        )
        page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
        if told.returncode or "00001-of-00004.safetensors" not in told.stdout or page not in told.stdout:
            sys.exit(f"{wheel.name}, installed: {told.stdout}{told.stderr}")


def main(folder: Path) -> None:
    os.chdir(ROOT)
    folder.mkdir(exist_ok=True)
    wheel = folder / build_meta.build_wheel(str(folder))
    archive = folder / build_meta.build_sdist(str(folder))
    look_at_wheel(wheel)
    look_at_archive(archive)
    use(wheel)
    print(f"{wheel}: {wheel.stat().st_size} bytes\n{archive}: {archive.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
