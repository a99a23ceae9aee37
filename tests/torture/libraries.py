"""What the Hugging Face Trainer saves through us, as small as it can be, and what is found of it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainingArguments

from shardwise.errors import ConfigError


@cache
def has_trainer() -> bool:
    """Whether this transformers has the doors that ShardwiseTrainer takes."""
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

    from shardwise.integrations import ShardwiseTrainer

    return type("Tortured", (ShardwiseTrainer, Trainer), {})


def save_by_trainer(folder: str, seed: int, _: Path) -> None:
    """The checkpoint of step ``seed``, of a model that ``seed`` makes; the one before is removed."""
    from shardwise.integrations import for_trainer

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
    from shardwise.integrations.trainer_runs import FolderKind, checkpoints_in, folder_of, whole_facts_of

    complete = [step for step, kind in checkpoints_in(folder).items() if kind is FolderKind.COMPLETE]
    if not complete:
        return None
    place = folder_of(folder, complete[-1])
    facts = whole_facts_of(place)
    assert facts.step == complete[-1]
    assert torch.load(place / "training_args.bin", weights_only=False).seed == facts.step
    names = ["model.safetensors", "config.json", "trainer_state.json", f"state/step-{facts.step}/__0_0.distcp"]
    return facts.step, *(hashlib.sha256((place / name).read_bytes()).hexdigest() for name in names)
