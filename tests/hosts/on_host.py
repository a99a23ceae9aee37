"""A program of two ranks on two hosts (``python -m tests.hosts.on_host FOLDER``): a line for each load and save."""

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwise


def main(folder: Path) -> None:
    """Rank 1 comes to the first call when rank 0 has written that it waits.

    ``folder`` is one for both hosts, but for ``disk`` in it.
    """
    bring_up, save = shardwise.from_pretrained, shardwise.save
    dist.init_process_group("gloo")
    while dist.get_rank() == 1 and "waiting for rank 1" not in Path(folder, "output0").read_text():
        time.sleep(0.05)
    model = bring_up(str(folder / "model"))
    tell("loaded", lambda: digest(model))
    tell("saved to one folder", lambda: save(model, str(folder / "saved")) and "")
    again = bring_up(str(folder / "saved"))
    tell("loaded again", lambda: digest(again))
    tell("own copies", lambda: digest(bring_up(str(folder / "disk" / "same"))))
    tell("differing values", lambda: digest(bring_up(str(folder / "disk" / "other values"))))
    tell("differing shapes", lambda: digest(bring_up(str(folder / "disk" / "other shapes"))))
    tell("saved to two folders", lambda: save(model, str(folder / "disk" / "saved")) and "")
    dist.destroy_process_group()
    os._exit(0)


def digest(model: object) -> str:
    """Of all values, whole."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():  # type: ignore[attr-defined]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.encode() + whole.contiguous().numpy().tobytes())
    return found.hexdigest()


def tell(what: str, call: Callable[[], str]) -> None:
    try:
        told = call()
    except shardwise.ShardwiseError as error:
        told = f"{type(error).__name__}: {error}"
    print(f"{what}: {told}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
