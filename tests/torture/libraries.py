"""Small saves by the Hugging Face Trainer and accelerate, and readers of them."""

import hashlib
import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.faults.saving import Blocks, sharded
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainingArguments

from shardwise.core.errors import ConfigError


@cache
def has_trainer() -> bool:
    """Whether this transformers has the names that ShardwiseTrainer patches."""
    try:
        import shardwise.integrations.trainer_compat  # noqa: F401
    except (ConfigError, ImportError):
        return False
    return True


def _model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1))


@cache
def _trainer_class() -> Any:
    from transformers import Trainer

    from shardwise.integrations.trainer import ShardwiseTrainer

    return type("Tortured", (ShardwiseTrainer, Trainer), {})


def save_by_trainer(folder: str, seed: int, _: Path) -> None:
    """The checkpoint of step ``seed``, of a model that ``seed`` makes; the one before is removed."""
    from shardwise.integrations.trainer_marks import for_trainer

    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], seed=seed, save_total_limit=1, disable_tqdm=True, max_steps=9
    )
    trainer = _trainer_class()(model=for_trainer(_model(seed)), args=arguments, train_dataset=[{"input_ids": [1]}])
    trainer.create_optimizer_and_scheduler(9)
    trainer.state.global_step = seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    trainer._save_checkpoint(trainer.model, None)


def is_of_the_trainer(name: str) -> bool:
    return name.endswith(("/trainer_state.json", "/training_args.bin"))


def of_trainer_in(folder: Path) -> Hashable:
    """The newest checkpoint that counts, which has to be whole."""
    from shardwise.integrations.trainer_checkpoints import (
        FolderKind,
        checkpoint_folder,
        checkpoints_in,
        read_complete_header,
    )

    complete = [step for step, kind in checkpoints_in(folder).items() if kind is FolderKind.COMPLETE]
    if not complete:
        return None
    place = checkpoint_folder(folder, complete[-1])
    header = read_complete_header(place)
    assert header.step == complete[-1]
    assert torch.load(place / "training_args.bin", weights_only=False).seed == header.step
    names = ["model.safetensors", "config.json", "trainer_state.json", f"state/step-{header.step}/__0_0.distcp"]
    return header.step, *(hashlib.sha256((place / name).read_bytes()).hexdigest() for name in names)


def is_of_accelerate(name: str) -> bool:
    return ".work/" in name


class _Counter:
    """What is saved beside the model."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@contextmanager
def accelerated(seed: int, form: str) -> Iterator[tuple[Any, _Counter]]:
    """An accelerator of one rank, with a model, an optimizer and a counter of this seed."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    import shardwise
    from shardwise.integrations import accelerate_compat

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with shardwise.integrations.accelerate():
            accelerator = Accelerator(cpu=True)
            plugin = accelerate_compat.fsdp2_plugin()
            accelerate_compat.become_fsdp2(accelerator.state, plugin)
            plugin.set_state_dict_type(form)
            model = sharded(seed)
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01 * seed))
            counter = _Counter(seed)
            accelerator.register_for_checkpointing(counter)
            accelerator.step = seed
            yield accelerator, counter
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        dist.destroy_process_group()


def save_by_accelerate(folder: str, seed: int, _: Path) -> None:
    """A state of all that accelerate and its users save; of the first seed in one file, of others in folders."""

    def write_more(models: Any, weights: Any, output_dir: str) -> None:
        place = Path(output_dir, "more")
        place.mkdir()
        (place / "seed.txt").write_text(str(seed))

    with accelerated(seed, "FULL_STATE_DICT" if seed == 1 else "SHARDED_STATE_DICT") as (accelerator, _counter):
        accelerator.register_save_state_pre_hook(write_more)
        accelerator.save_state(folder)


def of_accelerate_in(folder: Path) -> Hashable:
    """The seed that all there is of a state is of, by what load_state opens."""
    import shardwise
    from shardwise.saving.rename_journal import link_as_renamed

    before = _contents(folder)
    with link_as_renamed(folder) as seen:
        if not (seen / "random_states_0.pkl").is_file():
            return None
        model = Blocks(99)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        shardwise.load_accelerate_model(model, folder)
        shardwise.load_accelerate_optimizer(model, optimizer, folder)
        seed = int(model.steps)
        assert all(map(torch.equal, model.state_dict().values(), Blocks(seed).state_dict().values()))
        assert optimizer.param_groups[0]["lr"] == 0.01 * seed
        assert torch.load(seen / "custom_checkpoint_0.pkl", weights_only=False) == {"value": seed}
        assert torch.load(seen / "random_states_0.pkl", weights_only=False)["step"] == seed
        assert (seen / "more" / "seed.txt").read_text() == str(seed)
    assert _contents(folder) == before, "reading has changed what is there"
    return seed


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
