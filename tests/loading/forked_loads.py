"""Loads in many processes, each forked from one that has computed with several threads."""

import os
import sys
import traceback

import torch
from torch import nn

import shardwise

_FILES = 8


def main(folder: str, children: int) -> None:
    """Print how many children fail to load a model, which is saved to the folder first."""
    torch.set_num_threads(16)  # of the pool, which a child replaces: the more, the longer it takes
    torch.ones(1 << 18).sum()  # in several threads, as before most forks
    shardwise.save(_model("cpu", torch.bfloat16), folder, max_shard_size="128KB")
    _load(folder)  # whose modules are imported once
    failures = sum(os.waitpid(_fork(folder), 0)[1] != 0 for _ in range(children))
    print(f"{failures} of {children} have failed")


def _model(device: str, dtype: torch.dtype) -> nn.Module:
    """Return matrices of 128 KiB in bfloat16, so that each is a file and is cast by several threads."""
    return nn.Sequential(*(nn.Linear(256, 256, bias=False, device=device, dtype=dtype) for _ in range(_FILES)))


def _load(folder: str) -> None:
    report = shardwise.load(_model("meta", torch.float32), folder)
    assert len(report.files) == _FILES


def _fork(folder: str) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _load(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return child


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
