"""From the start of a process to the first optimizer step on every rank, imports included, against accelerate.

Each arm is started as its users do, in fresh interpreters: shardwise by its own launcher, which imports once and
forks the ranks; accelerate as one interpreter a rank, which is what its launcher makes, whose own time is not held
against it. Beside them shardwise with an interpreter a rank, as under torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import meter
from benchmarks.training import BRING_UP, TRAIN, Job, batches, quieten

FIRST_TOKENS = 8
OURS, OURS_BY_TORCHRUN, ACCELERATE = "shardwise", "shardwise, as by torchrun", "accelerate"
ARMS = (OURS, OURS_BY_TORCHRUN, ACCELERATE)


def start_once(arm: str, job: Job, ranks: int, timeout_s: float) -> float:
    """Seconds from the start of the first process until every rank has done its first step."""
    with tempfile.TemporaryDirectory(prefix="shardwise-start-") as folder:
        told = {"arm": arm, "job": vars(job), "ranks": ranks, "store": f"{folder}/store"}
        began = meter.timestamp()
        seats = [None] if arm == OURS else range(ranks)
        processes = [_interpreter({**told, "rank": rank}) for rank in seats]
        try:
            answers = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{arm}: a rank failed")
    return max(float(text.split()[-1]) for text in answers) - began


def _interpreter(told: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.start", json.dumps(told)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def main(argv: Sequence[str]) -> None:
    """What an interpreter of :func:`start_once` does; prints when the first step has been done."""
    told = json.loads(argv[0])
    job, ranks = Job(**told["job"]), told["ranks"]
    if told["arm"] == OURS:
        from shardwise.cli.launch import TRAINING, run_ranks

        print(max(run_ranks(ranks, first_step, OURS, job, preloaded=TRAINING)), flush=True)
        return
    import torch.distributed as dist

    if told["arm"] == ACCELERATE:
        import accelerate  # noqa: F401 - what its users import
    dist.init_process_group("gloo", store=dist.FileStore(told["store"], ranks), rank=told["rank"], world_size=ranks)
    print(first_step(told["arm"], job), flush=True)
    dist.destroy_process_group()


def first_step(arm: str, job: Job) -> float:
    """Bring the model up and take one step; when that was done. Collective: yes."""
    import torch.distributed as dist

    quieten()
    arm = arm.partition(",")[0]
    TRAIN[arm](BRING_UP[arm](job), batches(job, 1, dist.get_rank()))
    return meter.timestamp()


if __name__ == "__main__":
    from benchmarks import start  # under its own name, by which its function goes to the ranks

    start.main(sys.argv[1:])
