"""Every figure that is told has a file."""

import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_table_names_files_that_are_there() -> None:
    names = re.findall(r"^\|.*\| `([^`]+)` \|$", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    files = {path.name.removesuffix(path.suffix) for path in (BENCHMARKS / "results").iterdir()}
    assert len(names) > 15
    assert set(names) <= files
