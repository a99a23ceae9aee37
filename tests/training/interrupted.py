"""``shardwise``, of which a rank sends itself a signal before a step: ``ENDED="RANK STEP SIGNAL"``.

But not once torchrun has started it again.
"""

import os
from typing import Any

import torch.distributed as dist
import transformers

from shardwise.cli import main

train = transformers.Trainer.train


class Ended(transformers.TrainerCallback):
    def on_step_begin(self, *positional: Any, **_: Any) -> None:
        rank, step, number = map(int, os.environ["ENDED"].split())
        is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if (dist.get_rank(), positional[1].global_step + 1) == (rank, step) and not is_again:
            os.kill(os.getpid(), number)


def train_until(trainer: Any, *positional: Any, **keywords: Any) -> Any:
    trainer.add_callback(Ended())
    return train(trainer, *positional, **keywords)


if "ENDED" in os.environ:  # ranks that are spawned import this module, too
    transformers.Trainer.train = train_until  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
