"""``shardwise``, of which the last rank is killed in step 4, but not once torchrun has started it again."""

import os
import signal
from typing import Any

from transformers import TrainerCallback

from shardwise.cli import main
from shardwise.training import setup

make = setup.make_trainer


class Killed(TrainerCallback):
    def on_step_begin(self, *positional: Any, **_: Any) -> None:
        is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        if positional[1].global_step == 3 and is_last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


def with_callback(*positional: Any) -> Any:
    trainer = make(*positional)
    trainer.add_callback(Killed())
    return trainer


if __name__ == "__main__":
    setup.make_trainer = with_callback
    main()
