"""What callbacks know and change of a training, also of one that resumes, on one rank."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import datasets
import pytest
import torch
import trl
from tests.integrations.requirements import require_patched_names
from tests.training import tiny
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

require_patched_names()

from shardwise.core.phases import busy_with, main_thread_work  # noqa: E402
from shardwise.integrations import ShardwiseTrainer, for_trainer  # noqa: E402
from shardwise.integrations.trainer_compat import ComputesInNormalMode  # noqa: E402
from shardwise.training.run_config import read_run_config  # noqa: E402
from shardwise.training.trl_objects import ResumableEarlyStopping, import_reward_functions, load_frozen, parse  # noqa: E402

ROWS = [{"input_ids": torch.tensor([row + 1, 5, 6]), "labels": torch.tensor([row + 1, 5, 6])} for row in range(16)]


class OwnTrainer(ShardwiseTrainer, Trainer):
    """A trainer as a user would make it."""


class NumberedRows(list[Any]):
    """Rows with an attribute that streams have, too."""

    n_shards = 2


class SaveAt(TrainerCallback):
    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_save = control.should_save or state.global_step in self.steps


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class PreemptAt(StopAt):
    """Stops a trainer, to be resumed later."""

    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        super().on_step_end(args, state, control)
        self.trainer.is_stop_requested = state.global_step == self.step


class PreemptDuring(PreemptAt):
    """Stops a trainer during the evaluation of a step, in its last dataset but for the last batch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.batches = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.batches += 1
        if state.global_step == self.step and self.batches == 3:
            control.should_save = control.should_training_stop = True
            self.trainer.is_stop_requested = True


def make_trainer(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2, **settings}
    eval_dataset = settings.pop("eval_dataset", None)
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    return OwnTrainer(
        model=for_trainer(model),
        args=TrainingArguments(output_dir=str(folder), **settings, **quiet),
        train_dataset=NumberedRows(ROWS),
        eval_dataset=eval_dataset or ROWS[:4],
        callbacks=list(callbacks),
    )


def train(folder: Path, *callbacks: TrainerCallback, resume: bool = False, **settings: Any) -> Any:
    trainer = make_trainer(folder, *callbacks, **settings)
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


@pytest.mark.parametrize("save_strategy", ["epoch", pytest.param("best", marks=pytest.mark.slow)])
def test_a_step_that_is_saved_before_its_evaluation_may_be_the_best(tmp_path: Path, save_strategy: str) -> None:
    """The loss falls, and steps 4 and 8 end an epoch."""
    settings: dict[str, Any] = {"save_strategy": save_strategy, "eval_strategy": "epoch", "num_train_epochs": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 1e-2}
    callbacks = SaveAt(4, 8), ResumableEarlyStopping(9)
    for resume in (False, True):
        state = train(tmp_path, *callbacks, resume=resume, **settings)
        assert (state.best_model_checkpoint, state.best_global_step) == (str(tmp_path / "checkpoint-8"), 8)
        assert [entry["step"] for entry in state.log_history if "eval_loss" in entry] == [4, 8]


@pytest.mark.slow
def test_an_evaluation_after_its_save_counts_for_early_stopping_when_resumed(tmp_path: Path) -> None:
    """The loss falls, and the greatest is said to be the best, so that the second does not improve it."""
    settings: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "learning_rate": 1e-2}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True}
    train(tmp_path, ResumableEarlyStopping(2), SaveAt(8), num_train_epochs=2, **settings)
    resumed = train(tmp_path, ResumableEarlyStopping(2), resume=True, num_train_epochs=9, **settings)
    assert resumed.global_step == 12


@pytest.mark.parametrize("preempt", [PreemptAt(1), PreemptDuring(1)])
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_an_evaluation_that_a_stop_has_left_out_is_made_up(
    tmp_path: Path, strategy: str, preempt: PreemptAt
) -> None:
    """The loss falls, and the greatest is said to be the best: the evaluation of the step of the stop."""
    settings: dict[str, Any] = {"eval_strategy": strategy, "save_strategy": strategy, "save_total_limit": 1}
    # A step is an epoch.
    settings |= {"eval_steps": 1, "save_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 16}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "b_loss", "greater_is_better": True}
    settings |= {"eval_dataset": {"a": ROWS[4:6], "b": ROWS[:2]}, "per_device_eval_batch_size": 1}
    # The rate falls after the second evaluation, and the training ends after the third. Each step draws noise.
    settings |= {"lr_scheduler_type": "reduce_lr_on_plateau", "learning_rate": 1e-2, "neftune_noise_alpha": 5.0}
    settings |= {"lr_scheduler_kwargs": {"patience": 0, "mode": "max", "factor": 0.5}, "num_train_epochs": 4}
    whole = train(tmp_path / "whole", ResumableEarlyStopping(2), **settings)
    preempt.trainer = make_trainer(tmp_path / "stopped", ResumableEarlyStopping(2), preempt, **settings)
    preempt.trainer.train()
    assert not any("eval_a_loss" in entry for entry in preempt.trainer.state.log_history)
    resumed = train(tmp_path / "stopped", ResumableEarlyStopping(2), resume=True, **settings)
    assert resumed.global_step == whole.global_step == 3
    assert resumed.best_global_step == whole.best_global_step == 1
    assert resumed.best_model_checkpoint == str(tmp_path / "stopped" / "checkpoint-1")
    assert steps_in(tmp_path / "stopped") == steps_in(tmp_path / "whole") == ["1"]
    names = ("step", "loss", "eval_a_loss", "eval_b_loss", "learning_rate")
    told, expected = (
        [[entry.get(name) for name in names] for entry in one.log_history] for one in (resumed, whole)
    )
    assert told == expected


@pytest.mark.parametrize("preempt", [PreemptAt(8), PreemptDuring(8)])
def test_an_evaluation_that_a_stop_at_the_end_has_left_out_is_made_up(tmp_path: Path, preempt: PreemptAt) -> None:
    """The last step may have been saved before its evaluation."""
    settings: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 1e-2}
    settings |= {"per_device_eval_batch_size": 1}
    preempt.trainer = make_trainer(tmp_path, preempt, SaveAt(8), **settings, save_total_limit=1)
    preempt.trainer.train()
    resumed = train(tmp_path, resume=True, **settings, save_total_limit=1)
    assert [entry["step"] for entry in resumed.log_history if "eval_loss" in entry] == [4, 8]
    assert (resumed.best_global_step, steps_in(tmp_path)) == (8, ["8"])


def test_what_was_evaluated_without_a_word_in_the_log_is_not_evaluated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[int] = []

    def evaluate(self: Any, **_: Any) -> dict[str, float]:
        evaluated.append(self.state.global_step)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, {"eval_loss": 1.0})
        return {"eval_loss": 1.0}

    monkeypatch.setattr(OwnTrainer, "evaluate", evaluate)
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    train(tmp_path, max_steps=2, **settings)
    train(tmp_path, resume=True, max_steps=3, **settings)
    assert evaluated == [2, 3]


WORK: list[str] = []
"""What other ranks would be told of this one, in each call of a reward function."""


def score(completions: list[str], unit: float = 1.0, **_: Any) -> list[float]:
    WORK.append(main_thread_work()[1])
    return [sum(map(ord, text)) / unit for text in completions]


async def async_score(completions: list[str], **keywords: Any) -> list[float]:
    return score(completions, **keywords)


class Score:
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return score(completions)


class AsyncScore:
    async def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return score(completions)


of_object, of_async_object = Score(), AsyncScore()
of_partial, of_async_partial = partial(score, unit=1.0), partial(async_score, unit=1.0)
REWARDS = {
    "Score": "of_object",
    "AsyncScore": "of_async_object",
    "score": "of_partial",
    "async_score": "of_async_partial",
}
"""Paths of reward functions by the names of their metrics."""


class SampledTrainer(ShardwiseTrainer, trl.GRPOTrainer):
    """Notes the prompts of each step."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.prompts.append(inputs["prompt_ids"].tolist())
        return super()._compute_loss(model, inputs)


@pytest.mark.filterwarnings("ignore:.*save_steps", "ignore:`gradient_checkpointing.*:FutureWarning")
def test_sampled_answers_are_to_the_same_prompts_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps train on the answers to a prompt. A training ends between them, resumes, and begins again."""
    paths = [f"{__name__}.{name}" for name in REWARDS.values()]
    words = ["grpo", "--reward_funcs", *paths, "--model_name_or_path", "m", "--bf16", "false", "--beta", "0"]
    arguments = parse(read_run_config(words))
    rewards = load_frozen(arguments, import_reward_functions(arguments))["reward_funcs"]

    gathering: list[str] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        gathering.append(main_thread_work()[1])
        return tensor

    monkeypatch.setattr(accelerate.utils, "gather", gather)

    def train_sampled(folder: str, *callbacks: TrainerCallback, resumes: Sequence[bool] = (False,)) -> list[Any]:
        settings = {"max_steps": 5, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False}
        settings |= {"num_generations": 2, "max_completion_length": 2, "num_iterations": 2, "disable_tqdm": True}
        trainer = SampledTrainer(
            model=for_trainer(tiny.model()),
            args=trl.GRPOConfig(str(tmp_path / folder), per_device_train_batch_size=2, **settings),
            train_dataset=datasets.Dataset.from_list([{"prompt": f"{n} " * 3} for n in range(5)]),
            processing_class=tiny.tokenizer(),
            reward_funcs=rewards,
            callbacks=list(callbacks),
        )
        assert trainer.reward_func_names == list(REWARDS)
        trainer.prompts = []
        for resume in resumes:
            trainer.train(resume_from_checkpoint=resume)
        last = trainer.state.log_history[-1]
        assert len({last[f"rewards/{name}/mean"] for name in REWARDS}) == 1
        return trainer.prompts

    whole = train_sampled("whole", resumes=(False, False))
    assert whole[0] == whole[1] != whole[2] == whole[3] != whole[4]
    stopped = train_sampled("stopped", StopAt(3))
    assert [*stopped, *train_sampled("stopped", resumes=(True,))] == whole[:5] == whole[5:]
    assert {*WORK} == {f"the reward functions {', '.join(REWARDS)}"}
    assert {*gathering} == {""}


def test_a_reward_model_is_work_of_all_ranks() -> None:
    class Scorer(torch.nn.Module):
        def forward(self) -> str:
            return main_thread_work()[1]

    model = Scorer()
    ComputesInNormalMode(model)
    with busy_with("rewards"), torch.inference_mode():
        assert (model(), main_thread_work()[1]) == ("", "rewards")


def test_early_stopping_counts_anew_in_another_training(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "max_steps": 8}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, ResumableEarlyStopping(2), **settings)
    for _ in range(2):
        trainer.train()
        assert trainer.state.global_step == 3
