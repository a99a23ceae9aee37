"""The names that users see."""

from __future__ import annotations

import subprocess
import sys

import shardwise


def test_every_name_that_is_stated_is_there():
    assert len(shardwise.__all__) > 100
    for name in shardwise.__all__:
        found = getattr(shardwise, name)
        assert getattr(found, "__name__", name) == name or not hasattr(found, "__name__"), name
    assert dir(shardwise) == shardwise.__all__


def test_importing_the_package_brings_nothing_that_is_slow():
    words = "import sys, shardwise; print(sorted({'torch', 'transformers', 'numpy', 'click'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
