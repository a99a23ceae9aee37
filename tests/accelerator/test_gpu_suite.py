"""The tests for GPUs, on the simulated accelerator."""

import subprocess
import sys
from pathlib import Path

from tests.accelerator.simulated import environment
from tests.quantized.requirements import SHARDS_PACKED

ROOT = Path(__file__).parents[2]


def test_gpu_tests_pass_on_the_simulated_accelerator(library):
    """In a process of its own: one that has registered an accelerator has it until it ends."""
    options = [
        "-q",
        "-m",
        "gpu",
        "-k",
        "npu and not (liger or vllm or way_of_computing)",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/gpu"],
        cwd=ROOT,
        env=environment(delay_us=200),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("skipped" in done.stdout.splitlines()[-1]) is not SHARDS_PACKED
