"""What the ranks of a doomed world do when one of them skips a call, or is lost between two."""

import os
import signal
import time

import torch.distributed as dist
from tests.faults.doomed import Seat
from tests.harness.world import attempt
from tests.verbs.on_ranks import Plain, angles, shard_plain

import shardwise
from shardwise.execution import Timeouts, control_channel
from shardwise.execution.outcomes import Failure
from shardwise.execution.world import World

Told = tuple[str, str]


def skip(seat: Seat, checkpoint: str, folder: str, timeouts: Timeouts) -> list[Told]:
    """Rank 1 skips a save and comes to a load; all load; it skips a load and comes to another call; all go on."""
    model = shard_plain(Plain())
    options = shardwise.options.LoadOptions(timeouts=timeouts, progress=False)
    saving = shardwise.options.SaveOptions(timeouts=timeouts, progress=False)

    def load() -> object:
        return shardwise.load(model, checkpoint, buffers={"*.angles": angles}, options=options)

    def save() -> object:
        return shardwise.save(model, folder, options=saving)

    def state() -> object:
        return shardwise.get_model_state_dict(model, options=shardwise.options.StateOptions(timeouts=timeouts))

    told = [attempt(load)]
    told.append(attempt(load if seat.rank == 1 else save))
    told.append(attempt(load))
    told.append(attempt(state if seat.rank == 1 else load))
    told.extend([attempt(save), attempt(load)])
    return told


def lose(seat: Seat, checkpoint: str, timeouts: Timeouts, kind: str, rank: int) -> Told:
    """All load; a rank is lost as it computes; the others go on to another call."""
    model = shard_plain(Plain())
    options = shardwise.options.LoadOptions(timeouts=timeouts, progress=False)

    def load() -> object:
        return shardwise.load(model, checkpoint, buffers={"*.angles": angles}, options=options)

    load()
    dist.barrier()
    if seat.rank == rank:
        seat.tell()
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                seat.wait_to_be_stopped()
            case "end":
                os._exit(0)
    else:
        time.sleep(0.3)
    return attempt(load)


def fail_alone(seat: Seat, timeouts: Timeouts, first: str) -> None:
    """Rank 1 fails, in no call of a verb's, and is slow to look; the first rank ends before it does."""
    seat.leaves = True
    world = World.current(timeouts=timeouts)

    def tell() -> int:
        if seat.rank == 1:
            seat.tell()
            raise shardwise.StorageError("struck")
        return seat.rank

    def conclude(said: list[int]) -> int:
        raise AssertionError(said)

    world.run_all(lambda: None)
    if seat.rank == 1:
        control_channel._FIRST_POLL_S = control_channel._LAST_POLL_S = 0.5
    if seat.rank == 0 and first == "untold":
        Failure.among = lambda *_: os._exit(1)  # type: ignore[method-assign, assignment]
    world.map_reduce(tell, conclude)
