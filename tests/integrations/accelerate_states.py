"""States that an accelerator saves and loads, on the ranks of a test world. Importable, for spawned processes."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import accelerator as accelerator_module
from tests.integrations.accelerating import (
    OURS,
    STEPS,
    accelerator_for,
    begin,
    launched,
    model_of,
    run,
    same_bits,
    whole,
)
from tests.loading.on_ranks import attempt

import shardwise


def _prepared(checkpoint: str, way: tuple[str, bool], kind: str, **settings: Any) -> tuple[Any, tuple[Any, ...]]:
    accelerator = accelerator_for(*way, **settings)
    return accelerator, begin(accelerator, model_of(checkpoint, *way, kind))


def _moments(prepared: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    model, optimizer, *_ = prepared
    state = shardwise.get_optimizer_state_dict(model, optimizer.optimizer, "full_on_all_ranks")["state"]
    return {f"{name}: {key}": value for name, entries in state.items() for key, value in entries.items()}


def saved(checkpoint: str, folder: str, way: tuple[str, bool], kind: str, form: str) -> list[float]:
    """Save after the first step, and go on; the losses of all steps."""
    with launched(), shardwise.integrations.accelerate():
        accelerator, prepared = _prepared(checkpoint, way, kind)
        accelerator.state.fsdp_plugin.set_state_dict_type(form)
        first = run(accelerator, prepared, 0, 1)
        accelerator.save_state(folder)
        kept = {**whole(prepared[0]), **_moments(prepared)}
        if accelerator.is_main_process:
            torch.save(kept, Path(folder).parent / "kept.pt")
        return first.losses + run(accelerator, prepared, 1, STEPS).losses


def resumed(checkpoint: str, folder: str, way: tuple[str, bool], kind: str) -> tuple[list[str], list[float]]:
    """What is not as it was saved, bit for bit, and the losses of the steps that were left."""
    with launched(), shardwise.integrations.accelerate():
        accelerator, prepared = _prepared(checkpoint, way, kind)
        run(accelerator, prepared, 0, 1)
        accelerator.load_state(folder)
        expected = torch.load(Path(folder).parent / "kept.pt", weights_only=True)
        if way == (OURS, True) and kind == "whole":
            assert prepared[2].scheduler.last_epoch == 1
        differing = same_bits({**whole(prepared[0]), **_moments(prepared)}, expected)
        return differing, run(accelerator, prepared, 1, STEPS).losses


def killed(checkpoint: str, folder: str) -> None:
    """Every rank is killed in the middle of the second save into one folder."""
    with launched(), shardwise.integrations.accelerate():
        accelerator, prepared = _prepared(checkpoint, (OURS, True), "whole")
        run(accelerator, prepared, 0, 1)
        accelerator.save_state(folder)
        kept = {**whole(prepared[0]), **_moments(prepared)}
        if accelerator.is_main_process:
            torch.save(kept, Path(folder).parent / "kept.pt")
        accelerator.wait_for_everyone()
        run(accelerator, prepared, 1, 2)

        def die(*args: Any, **keywords: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch.object(accelerator_module, "save_accelerator_state", die):
            accelerator.save_state(folder)


def numbered(checkpoint: str, folder: str) -> tuple[list[str], int]:
    """Three saves under automatic names, of which two are kept; the newest is found."""
    from accelerate.utils import ProjectConfiguration

    with launched(), shardwise.integrations.accelerate():
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator, prepared = _prepared(checkpoint, (OURS, True), "whole", project_config=project)
        run(accelerator, prepared, 0, 1)
        for _ in range(3):
            accelerator.save_state()
        names = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
        expected = whole(prepared[0])
        run(accelerator, prepared, 1, 2)
        left = Path(folder, "checkpoints", "checkpoint_3")
        if accelerator.is_main_process:  # as of a save that was killed
            left.mkdir()
            (left / ".scheduler.bin.0123abcd.new").write_text("half")
            (left / ".shardwise.0123abcd.work").mkdir()
        accelerator.wait_for_everyone()
        accelerator.load_state()
        assert same_bits(whole(prepared[0]), expected) == []
        found = names + sorted(path.name for path in Path(folder).iterdir()), accelerator.save_iteration
        accelerator.save_state()
        assert not [path.name for path in left.iterdir() if path.name.startswith(".")]
        accelerator.project_configuration.iteration = 3
        assert "exists already" in attempt(accelerator.save_state)[1]
        assert sorted(path.name for path in left.parent.iterdir()) == ["checkpoint_2", "checkpoint_3"]
        return found


def by_accelerate_alone(checkpoint: str, folder: str) -> list[str]:
    """What is saved under the switch, accelerate loads without it, and the reverse."""
    with launched():
        switch = shardwise.integrations.accelerate()
        switch.install()
        accelerator, prepared = _prepared(checkpoint, (OURS, True), "whole")
        run(accelerator, prepared, 0, 1)
        assert Path(accelerator.save_state(f"{folder}/ours")) == Path(folder, "ours")
        expected = {**whole(prepared[0]), **_moments(prepared)}
        switch.remove()
        run(accelerator, prepared, 1, 2)
        accelerator.load_state(f"{folder}/ours")
        faults = same_bits({**whole(prepared[0]), **_moments(prepared)}, expected)
        accelerator.save_state(f"{folder}/theirs")
        with switch:
            run(accelerator, prepared, 1, 2)
            accelerator.load_state(f"{folder}/theirs")
        return faults + same_bits({**whole(prepared[0]), **_moments(prepared)}, expected)


def failing_on_one(checkpoint: str, folder: str) -> list[tuple[str, str]]:
    """A rank on which accelerate's own files cannot be written, and one on which they cannot be read."""

    def fails(*args: Any, **keywords: Any) -> None:
        raise OSError("no room")

    told = []
    with launched(), shardwise.integrations.accelerate():
        accelerator, prepared = _prepared(checkpoint, (OURS, True), "whole")
        run(accelerator, prepared, 0, 1)
        accelerator.save_state(folder)
        expected = whole(prepared[0])
        for name in ("save_accelerator_state", "load_accelerator_state"):
            broken = mock.patch.object(accelerator_module, name, fails) if dist.get_rank() else nullcontext()
            with broken:
                told.append(attempt(getattr(accelerator, name.replace("accelerator_", "")), folder))
        run(accelerator, prepared, 1, 2)
        accelerator.load_state(folder)
        assert same_bits(whole(prepared[0]), expected) == []
    return told
