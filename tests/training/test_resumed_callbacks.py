"""What callbacks know of a training that resumes, on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.requirements import require_patched_names
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

require_patched_names()

from shardwise.integrations import ShardwiseTrainer, for_trainer  # noqa: E402
from shardwise.training.trl_objects import ResumableEarlyStopping  # noqa: E402

ROWS = [{"input_ids": torch.tensor([row + 1, 5, 6]), "labels": torch.tensor([row + 1, 5, 6])} for row in range(16)]


class OwnTrainer(ShardwiseTrainer, Trainer):
    """A trainer as a user would make it."""


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def train(folder: Path, *callbacks: TrainerCallback, resume: bool = False, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2, **settings}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    trainer = OwnTrainer(
        model=for_trainer(model),
        args=TrainingArguments(output_dir=str(folder), **settings, **quiet),
        train_dataset=ROWS,
        eval_dataset=ROWS[:4],
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*"))


@pytest.mark.filterwarnings("ignore:.*save_steps")
def test_settings_and_callbacks_of_today_count(tmp_path: Path) -> None:
    train(tmp_path, StopAt(2), max_steps=6)
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    train(tmp_path, ResumableEarlyStopping(9), resume=True, max_steps=6, **{**evaluated, "save_steps": 1})
    assert steps_in(tmp_path) == ["2", "3", "4", "5", "6"]


def test_early_stopping_continues_to_count(tmp_path: Path) -> None:
    """The loss falls, and the greatest is said to be the best, so that no evaluation but the first improves it."""
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 8}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 1e-2}
    whole = train(tmp_path / "whole", ResumableEarlyStopping(4), **settings)
    assert whole.global_step == 5
    train(tmp_path / "stopped", ResumableEarlyStopping(4), StopAt(3), **settings)
    resumed = train(tmp_path / "stopped", ResumableEarlyStopping(4), resume=True, **settings)
    assert resumed.global_step == 5
    # The same command once more has nothing to do.
    assert train(tmp_path / "stopped", ResumableEarlyStopping(4), resume=True, **settings).global_step == 5
    assert steps_in(tmp_path / "stopped") == ["1", "2", "3", "4", "5"]
