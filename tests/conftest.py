"""What every test starts from, and every process that a test spawns."""

from __future__ import annotations

import os

# Read by Hugging Face's libraries when they are first imported, and inherited by spawned workers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# One thread per process: sums in one order, and worlds of several processes off each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# The same examples on every run: a failure comes back when the test is run again. `make sweep` looks further.
hypothesis.settings.register_profile(
    "default",
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
)
hypothesis.settings.register_profile(
    "thorough",
    max_examples=2000,
    derandomize=False,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none; torch is imported only when somebody asks."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
