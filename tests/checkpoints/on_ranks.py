"""Functions that ranks run in tests of checkpoints."""

import copy
import random
import threading
from concurrent import futures
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests import truth, zoo
from tests.checkpoints import tiny
from tests.checkpoints.tiny import Positions, Training, differences
from tests.loading.on_ranks import attempt
from tests.small_checkpoints import small_qwen3
from tests.support.crashes import EffectLog, recorded
from tests.support.files import flip_bit
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise import Checkpointer, TrainState
from shardwise.checkpoints import step_folders, summaries, write
from shardwise.core.phases import current_phases
from shardwise.files.local_writer import open_writer
from shardwise.options import AdapterOnly, Ignore, StateOptions
from shardwise.saving.locked_folder import LockedFolder
from shardwise.transfer.distributed_chunks import ChunkStaging


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train_and_save(
    folder: str, steps: int, mode: str = "sync", way: str = "flat", more: int = 0, **settings: Any
) -> dict[str, Any]:
    """Train, save, and train on: what the state was as it was saved, and what came after."""
    training = Training(way=way, **settings)
    training.step(steps)
    seed_all(100 + tiny.rank())
    with Checkpointer(folder, mode=mode) as checkpointer:
        saved = training.taken()
        report = checkpointer.save(steps, training.state)
        numbers = tiny.draws()
        training.losses.clear()
        training.step(more)
    return {"state": saved, "losses": training.losses, "numbers": numbers, "report": report.to_dict()}


def restore_and_train(
    folder: str, more: int = 0, way: str = "flat", save_at: int = 0, step: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Restore into a training that is somewhere else, and train on."""
    training = Training(seed=1, way=way, **settings)
    training.step(1)
    seed_all(7)
    with Checkpointer(folder) as checkpointer:
        report = checkpointer.restore(training.state, None if step is None else step)
        numbers = tiny.draws()
        found = training.taken()
        training.losses.clear()
        training.step(more)
        after = training.taken()
        if save_at:
            checkpointer.save(save_at, training.state)
    return {
        "state": found,
        "losses": training.losses,
        "numbers": numbers,
        "report": report.to_dict(),
        "text": str(report),
        "after": after,
    }


def train_while_it_is_written(folder: str, steps: int) -> tuple[dict[str, Any], bool]:
    """No byte is written before the training has gone on and everything is another."""
    training = Training()
    training.step(steps)
    seed_all(100 + tiny.rank())
    may_write = threading.Event()
    original = write.write_in_background

    def late(*args: Any) -> Any:
        may_write.wait()
        return original(*args)

    with mock.patch.object(write, "write_in_background", late), Checkpointer(folder, mode="async") as checkpointer:
        saved = training.taken()
        report = checkpointer.save(steps, training.state)
        assert current_phases() == ""  # the phase of the save has ended on this thread
        training.step(2)
        is_early = (Path(report.directory) / ".metadata").exists()
        may_write.set()
        assert checkpointer.wait().is_complete
    return saved, is_early


def save_twice(folder: str) -> list[int]:
    """Where the copies of two checkpoints lay."""
    training = Training()
    memories: list[int] = []
    with Checkpointer(folder, mode="async") as checkpointer:
        for step in (1, 2):
            training.step()
            checkpointer.save(step, training.state)
            memories.append(checkpointer._staging._slabs[0].data_ptr())
    return memories


def only_some(folder: str) -> tuple[str, str]:
    """The ranks of one row of an HSDP mesh do not have all that they are to save."""
    training = Training()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    options = StateOptions(process_group=half)
    checkpointer = Checkpointer(f"{folder}/{dist.get_rank() // 2}", options=options)
    return attempt(lambda: checkpointer.save(1, training.state))


class Own(Positions):
    """A position that is another on every rank."""


def save_own_positions(folder: str) -> list[str]:
    """Save a position and a schedule of each rank. Return the warnings of this rank."""
    training = Training()
    training.data = Own(10 + tiny.rank())
    training.schedule._step_count += tiny.rank() > 1
    with mock.patch.object(summaries, "_log") as log:
        Checkpointer(folder).save(1, training.state)
    return [call.args[0] % call.args[1:] for call in log.warning.call_args_list]


def restore_own_positions(folder: str) -> tuple[tuple[str, str], int, dict[str, Any]]:
    training = Training()
    checkpointer = Checkpointer(folder)
    error = attempt(lambda: checkpointer.restore(training.state))
    report = checkpointer.restore(training.state, on_mismatched=Ignore(only=("data",)))
    return error, training.data.at, report.to_dict()


def random_numbers(folder: str, kind: str) -> list[tuple[float, float, float]]:
    """The next numbers on this rank: after a save, as they would come, or after it was restored."""
    training = Training()
    checkpointer = Checkpointer(folder)
    if kind == "save":
        random.seed(tiny.rank())
        np.random.seed(tiny.rank())
        torch.manual_seed(5)  # alike on all ranks
        checkpointer.save(1, training.state)
    else:
        seed_all(99)
        checkpointer.restore(training.state)
    return [tiny.draws() for _ in range(2)]


def keep_last(folder: str, keep: int) -> list[Any]:
    training = Training()
    found: list[Any] = []
    with Checkpointer(folder, keep=keep or None) as checkpointer:
        for step in (2, 5, 10, 11):
            report = checkpointer.save(step, training.state)
            found.append((checkpointer.steps(), report.removed))
        assert checkpointer.latest() == 11
    return found


def refused(folder: str, fault: str) -> tuple[str, str]:
    """A call that cannot be honored."""
    training = Training()
    checkpointer = Checkpointer(folder)
    state: Any = training.state
    if fault == "meta":
        with torch.device("meta"):
            state = TrainState(tiny.Tiny())
    elif fault == "no state_dict":
        state = TrainState(training.model, data=object())
    elif fault == "no plain data":
        training.data.at = Path("x")
    elif fault == "shard in the data":
        training.data.at = training.model.head.weight
    elif fault == "shard in a schedule":
        training.schedule.mean = [training.model.head.weight.detach()]
    elif fault == "no json":
        state = TrainState(training.model, user={"at": {1, 2}})
    elif fault == "complex128":
        training.model.register_buffer("phases", torch.ones(3, dtype=torch.complex128))
    elif fault == "other optimizer":
        state = TrainState(training.model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    elif fault == "step":
        return attempt(lambda: checkpointer.save(-1, state))
    elif fault == "other steps":
        return attempt(lambda: checkpointer.save(1 - 2 * tiny.rank(), state))
    elif fault == "other rates":
        training.optimizer.param_groups[1]["lr"] = 0.5 if tiny.rank() else 0.02
    elif fault == "some positions":
        state = TrainState(training.model, data=Positions() if tiny.rank() else None)
    elif fault == "mark":
        checkpointer._root.mkdir(exist_ok=True)
        with open_writer(folder) as writer:
            held = LockedFolder(writer, "another") if tiny.rank() == 0 else None
            dist.barrier()
            error = attempt(lambda: checkpointer.save(1, state))
            if held is not None:
                held.release()
            return error
    elif fault == "raise while writing":
        with rank_1_fails(write, "_write_local", OSError("struck")):
            return attempt(lambda: checkpointer.save(1, state))
    return attempt(lambda: checkpointer.save(1, state))


def rank_1_fails(owner: Any, name: str, error: Exception) -> Any:
    """Have a function raise on the second rank, within a block."""
    return mock.patch.object(owner, name, side_effect=error) if tiny.rank() == 1 else nullcontext()


def fail_in_the_background(folder: str) -> tuple[Any, ...]:
    """What befalls rank 1's writing is told to all at the next call, and the next checkpoint succeeds."""
    training = Training()
    checkpointer = Checkpointer(folder, mode="async")
    checkpointer.save(1, training.state)
    checkpointer.wait()
    with rank_1_fails(write, "_write_local", OSError("struck")), mock.patch.object(write, "_log") as log:
        report = checkpointer.save(2, training.state)
        futures.wait([checkpointer._in_progress[1]])
    assert log.warning.call_count == 1  # nobody may ask for it any more
    error = attempt(lambda: checkpointer.save(3, training.state))
    steps = checkpointer.steps()
    checkpointer.save(3, training.state)
    checkpointer.close()
    return error, report.is_complete, steps, checkpointer.steps()


def fail_to_tidy_up(folder: str, mode: str) -> tuple[Any, ...]:
    """A checkpoint that counts by the time something fails is known of by the next one."""
    training = Training()
    checkpointer = Checkpointer(folder, mode=mode, keep=1)

    def save() -> None:
        checkpointer.save(2, training.state)
        checkpointer.wait()

    checkpointer.save(1, training.state)
    checkpointer.wait()
    with mock.patch.object(step_folders, "remove", side_effect=LookupError("struck")):
        error = attempt(save)
    there = checkpointer.steps()
    checkpointer.save(3, training.state)
    checkpointer.close()
    return error, there, checkpointer.steps()


def wait_interrupted(folder: str) -> tuple[Any, ...]:
    """A wait that Ctrl-C ends leaves the checkpoint on its way: the next save waits for it before it copies."""
    training = Training()
    checkpointer = Checkpointer(folder, mode="async")
    checkpointer.save(1, training.state)
    with mock.patch.object(futures, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        checkpointer.wait()
    is_pending = checkpointer._in_progress is not None
    training.step()
    checkpointer.save(2, training.state)
    checkpointer.close()
    return is_pending, checkpointer.steps()


def fail_to_stage(folder: str) -> tuple[Any, ...]:
    """A rank that has no room for its copy: the save fails on all ranks."""
    training = Training()
    checkpointer = Checkpointer(folder, mode="async")
    checkpointer.save(1, training.state)
    checkpointer.wait()
    with rank_1_fails(ChunkStaging, "copy", MemoryError("struck")):
        error = attempt(lambda: checkpointer.save(2, training.state))
    left = sorted(path.name for path in Path(folder).iterdir())
    checkpointer.save(2, training.state)
    checkpointer.close()
    return error, left, checkpointer.steps()


def restore_badly(folder: str, fault: str) -> tuple[tuple[str, str], list[str]]:
    """The error, and what has changed nevertheless."""
    training = Training(seed=3)
    training.step(1)
    model, state, which = training.model, training.state, None
    before = training.taken()
    if fault == "optimizer of others":
        state = replace(state, optimizers=torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1]))
    elif fault == "other optimizer":
        state = replace(state, optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    elif fault == "no optimizer":
        state = replace(state, optimizers=())
    elif fault == "scaler":
        state = replace(state, scaler=torch.amp.GradScaler("cpu"))
    elif fault == "other schedule":
        state = replace(state, schedulers=torch.optim.lr_scheduler.StepLR(training.optimizer, 2))
    elif fault == "schedule of more groups":
        more = torch.optim.SGD([{"params": [parameter]} for parameter in list(model.parameters())[:3]], lr=0.1)
        state = replace(state, schedulers=torch.optim.lr_scheduler.LambdaLR(more, lambda step: 1.0))
    elif fault == "other model":
        other = nn.Sequential(nn.Linear(6, 7))
        state = TrainState(fully_shard(other) if dist.is_initialized() else other)
    elif fault == "dtype":
        state = replace(state, model=model.bfloat16(), optimizers=())
    else:
        which = {"step": 4, "which": 1 + tiny.rank()}[fault]
    error = attempt(lambda: Checkpointer(folder).restore(state, which))
    return error, [] if fault == "dtype" else differences(training.taken(), before)


def restore_others(folder: str) -> list[tuple[Any, ...]]:
    """Into optimizers of other kinds: the error, and what has changed nevertheless."""
    found: list[tuple[Any, ...]] = []
    for make, settings in ((torch.optim.NAdam, {}), (torch.optim.Adam, {}), (torch.optim.AdamW, {"amsgrad": True})):
        training = Training(seed=3, make=make, **settings)
        before = training.taken()
        error = attempt(lambda training=training: Checkpointer(folder).restore(training.state))
        found.append((error, differences(training.taken(), before)))
    return found


def resume_with_torch(step: str) -> dict[str, Any]:
    """What torch's own loader makes of a checkpoint, in a training that is somewhere else."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    training = Training(seed=1)
    training.step(1)
    with zoo.silenced():
        model, optimizer = get_state_dict(training.model, training.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=step, no_dist=not dist.is_initialized())
        set_state_dict(
            training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    return training.taken()


def flip(place: Path, position: int) -> None:
    """One bit of a file, or back."""
    if tiny.rank() == 0:
        flip_bit(place, position)
    if dist.is_initialized():
        dist.barrier()


def restore_damaged(
    folder: str, places: list[tuple[str, int]], way: str = "flat", base: str = ""
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """The errors where one bit of a file has been flipped, each in turn, and the report where none has."""

    def restore() -> dict[str, Any]:
        if base:
            model = shardwise.from_pretrained(base, load_weights=False)
            state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.5))
        else:
            state = Training(seed=1, way=way).state
        return Checkpointer(folder).restore(state).to_dict()

    step = Path(folder, f"step-{Checkpointer(folder).latest()}")
    errors: list[tuple[str, str]] = []
    for name, position in places:
        flip(step / name, position)
        errors.append(attempt(restore))
        flip(step / name, position)
    return errors, restore()


# Adapters


def lora(seed: int, r: int = 4, hidden: int = 32, **settings: Any) -> nn.Module:
    """A small model with an adapter; the base is always the same, the adapter the seed's."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=r, target_modules=["q_proj", "up_proj"], **settings)
    with zoo.silenced():
        model = get_peft_model(small_qwen3(hidden_size=hidden), config)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    if dist.is_initialized():
        for block in model.base_model.model.model.layers:
            fully_shard(block)
        fully_shard(model)
    return model


def restore_two_models(folder: str) -> list[str]:
    """Two models, sharded one by one, in one checkpoint: what differs after they are restored."""
    taken: list[dict[str, torch.Tensor]] = []
    for seed in (1, 2):
        models = nn.ModuleDict({"student": tiny.built(seed), "ema": tiny.built(seed + 2)})
        state = TrainState(models, torch.optim.AdamW(models["student"].parameters(), lr=0.1))
        models["student"](torch.arange(4)).sum().backward()
        state.all_optimizers[0].step()
        if seed == 1:
            Checkpointer(folder).save(1, state)
        else:
            Checkpointer(folder).restore(state)
        taken.append(shardwise.get_model_state_dict(models, "full_on_all_ranks"))
    return differences(*taken)


def out_of_ddp(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """A training in DDP goes on sharded: what then differs in the optimizer, in the model, and back in DDP."""
    inner = small_qwen3()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step_lora(model, optimizer, 0)
    shardwise.save(model, folder / "saved")
    Checkpointer(folder / "steps").save(1, TrainState(model, optimizer))
    sharded = shardwise.from_pretrained(folder / "saved", dtype=torch.float32, load_weights=False)
    other = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    Checkpointer(folder / "steps").restore(TrainState(sharded, other))
    expected = shardwise.get_optimizer_state_dict(inner, optimizer, "full_on_all_ranks")["state"]
    found = shardwise.get_optimizer_state_dict(sharded, other, "full_on_all_ranks")["state"]
    assert len(found) > 20
    restored = truth.differences(truth.snapshot(sharded), truth.snapshot(inner))
    shardwise.save(torch.optim.swa_utils.AveragedModel(inner), folder / "averaged")
    wrapped = nn.parallel.DistributedDataParallel(small_qwen3())
    shardwise.load(sharded, folder / "averaged")
    shardwise.set_model_state_dict(wrapped, shardwise.get_model_state_dict(sharded))
    back = truth.differences(truth.snapshot(wrapped.module), truth.snapshot(inner))
    return differences(found, expected), restored, back


def step_lora(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    tokens = torch.randint(0, 97, (2, 6), generator=torch.Generator().manual_seed(seed))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def save_adapter(folder: str) -> dict[str, Any]:
    model = lora(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    step_lora(model, optimizer, 0)
    report = Checkpointer(folder, only=AdapterOnly()).save(1, TrainState(model, optimizer))
    return {"report": report.to_dict(), "losses": [step_lora(model, optimizer, seed) for seed in (1, 2)]}


def restore_adapter(folder: str, how: str) -> Any:
    settings: dict[str, Any] = {"rank": {"r": 8}, "alpha": {"lora_alpha": 32}, "base": {"hidden": 64}}.get(how, {})
    model = lora(2, **settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.5)
    state = TrainState(model, optimizer)
    if how != "same":
        only = None if how == "full" else AdapterOnly()
        return attempt(lambda: Checkpointer(folder, only=only).restore(state))
    report = Checkpointer(folder, only=AdapterOnly()).restore(state)
    losses = [step_lora(model, optimizer, seed) for seed in (1, 2)]
    return {"report": report.to_dict(), "text": str(report), "losses": losses}


# Bringing a model up


def save_pretrained_run(base: str, folder: str) -> Any:
    model = shardwise.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step_lora(model, optimizer, 0)
    Checkpointer(folder).save(1, TrainState(model, optimizer))
    return [step_lora(model, optimizer, seed) for seed in (1, 2)]


def resume_pretrained_run(base: str, folder: str) -> Any:
    """From the config alone: there are no weights beside it that could be read."""
    model = shardwise.from_pretrained(base, load_weights=False)
    is_hollow = all(parameter.is_meta for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    report = Checkpointer(folder).restore(TrainState(model, optimizer))
    losses = [step_lora(model, optimizer, seed) for seed in (1, 2)]
    return is_hollow, losses, report.to_dict()


# Crashes


def save_steps(folder: str, steps: list[int], keep: int, mode: str, log: str | None) -> None:
    training = Training()
    recording = nullcontext() if log is None else recorded(EffectLog(log), folder, writer=tiny.rank())
    with recording, Checkpointer(folder, keep=keep, mode=mode) as checkpointer:
        for step in steps:
            training.step()
            checkpointer.save(step, training.state)


def save_after_other_calls(folder: str) -> tuple[list[str], list[int]]:
    """Ranks are in different calls, and then in saves of different modes, before they save together."""
    training, checkpointer = Training(), Checkpointer(folder, mode="async")
    other = Checkpointer(folder, mode=("async", "sync")[tiny.rank()])
    first = attempt(lambda: [checkpointer.steps, lambda: checkpointer.save(1, training.state)][tiny.rank()]())
    second = attempt(lambda: other.save(1, training.state))
    checkpointer.save(2, training.state)
    checkpointer.wait()
    return [first[0], second[0]], checkpointer.steps()


def elsewhere(folder: str, is_renewed: bool) -> tuple[str, str]:
    """A save while another machine's mark is there, which is renewed or not."""
    with (
        mock.patch("shardwise.saving.saving_lock.RENEWAL_S", 0.1),
        mock.patch("shardwise.saving.saving_lock._POLL_S", 0.01),
        mock.patch("shardwise.saving.saving_lock._MAX_MISSED", 10**6 if is_renewed else 3),
    ):
        Path(folder).mkdir(exist_ok=True)
        with open_writer(folder) as writer:
            with (
                mock.patch("socket.gethostname", return_value="elsewhere"),
                mock.patch("shardwise.core.machine.namespace_id", return_value="elsewhere"),
            ):
                held = LockedFolder(writer, "theirs")
            if not is_renewed:
                held._ended.set()
                held._thread.join()
            error = attempt(lambda: Checkpointer(folder).save(1, Training().state))
            held.release()
    return error


def save_before_and_after_a_step(folder: str) -> tuple[list[int], list[str]]:
    """Save without optimizer state, with it, with it again (gathered), and with it in other memory on a rank.

    Return the tensors of each, and what differs.
    """
    training, checkpointer = Training(), Checkpointer(folder)
    counts = [checkpointer.save(0, training.state).tensors]
    for step in (1, 2, 3):
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        training.step()
        if step == 2:
            training.model.unshard()
        counts.append(checkpointer.save(step, training.state).tensors)
    wanted = training.taken()
    other = Training(seed=1)
    Checkpointer(folder).restore(other.state)
    return counts, differences(other.taken(), wanted)


def save_moved_shards(folder: str) -> list[str]:
    """Save shards, and again after they have moved and a step was done. Return what differs."""
    training, checkpointer = Training(), Checkpointer(folder)
    training.step()
    checkpointer.save(0, training.state)
    if dist.get_rank() == dist.get_world_size() - 1:
        for block in training.model.blocks:  # no buffers, which would be new tensors
            block._apply(torch.clone)
    training.step()
    checkpointer.save(1, training.state)
    wanted = training.taken()
    other = Training(seed=1)
    checkpointer.restore(other.state)
    return differences(other.taken(), wanted)
