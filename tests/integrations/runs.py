"""Trainings by the Hugging Face Trainer and TRL's, on ranks: through shardwise, and without it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.training import tiny
from torch.distributed.tensor import DTensor

ROWS = 48
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "max_steps": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 1,
}


@dataclass(frozen=True)
class Run:
    """What is trained, by what, and how.

    Attributes:
        folder: of the model, with an adapter beside it.
        trainer: "trainer", "sft", "dpo", "grpo".
        model: "whole", "frozen", "lora", "replicated lora", "dropping lora", "copying lora", "classes", "vision".
        by: "shardwise"; "patches": for_trainer alone; "user": as without shardwise.
        arguments: of the training arguments.
        resume: as of ``train``.
        dies_at: the step whose event raises, or kills this process.
        event: which one; or "in F", "in F before": when it saves, after or before the step F of that.
        end: "raise", "kill", "stop", "save".
        on_rank: whose.
        asks_for: "generation" or "save", after the training.
        tells: a file for the first rank's error.
        keywords: of ``train``, beside ``resume``.
    """

    folder: str
    trainer: str = "trainer"
    model: str = "whole"
    by: str = "shardwise"
    arguments: dict[str, Any] = field(default_factory=dict)
    resume: Any = None
    dies_at: int | None = None
    event: str = "on_step_end"
    end: str = "raise"
    on_rank: int | None = None
    asks_for: str = ""
    tells: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)
    evaluates_first: bool = False

    def but(self, **changes: Any) -> Run:
        return replace(self, **changes)


@dataclass
class Outcome:
    """What came of it, on one rank."""

    steps: list[tuple[float, float]]
    evaluated: list[float]
    weights: dict[str, torch.Tensor]
    generated: list[int]
    last_step: int
    best: str | None


def write(folder: Path) -> Path:
    """A model, an adapter for it that is not zero, one that classifies, and one that sees."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification

    tiny.write_model(folder / "causal")
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(folder / "causal")
    adapted = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    adapted.save_pretrained(folder / "adapter")
    adapted.peft_config["default"].lora_dropout = 0.3
    adapted.save_pretrained(folder / "dropping")
    base = AutoModelForCausalLM.from_pretrained(folder / "causal")
    with torch.no_grad(), warnings.catch_warnings(action="ignore", category=UserWarning):  # of tied embeddings
        copying = get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
        for parameter in copying.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter).mul_(0.05)
    copying.save_pretrained(folder / "copying")
    config = AutoModelForCausalLM.from_pretrained(folder / "causal").config
    config.num_labels = 3
    Qwen3ForSequenceClassification(config).save_pretrained(folder / "classes")
    tiny.tokenizer().save_pretrained(folder / "classes")
    vision().save_pretrained(folder / "vision")
    return folder


def vision() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(2)
    text = tiny.model().config.to_dict() | {"tie_word_embeddings": False}
    eyes = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "projection_dim": 16,
    }
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=eyes, image_token_index=259, vision_feature_layer=-1)
    )


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def bring_up(run: Run) -> Any:
    import transformers

    import shardwise
    from shardwise.integrations.trainer_marks import for_trainer

    folder, kind = Path(run.folder), run.model
    place = folder / {"classes": "classes", "vision": "vision"}.get(kind, "causal")
    classes: dict[str, Any] = {
        "classes": transformers.AutoModelForSequenceClassification,
        "vision": transformers.AutoModelForImageTextToText,
    }
    auto = classes.get(kind, transformers.AutoModelForCausalLM)
    if run.by == "nobody":
        model = auto.from_pretrained(place, dtype=torch.float32)
        if kind.endswith("lora"):
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, _adapter(run), is_trainable=True)
        if kind == "frozen":
            model.requires_grad_(False)
            model.model.layers[-1].requires_grad_(True)
        return model
    placement = "replicated" if kind.startswith("replicated") else "sharded"
    tuning: Any = shardwise.Full()
    if kind.endswith("lora"):
        tuning = shardwise.ExistingLora(_adapter(run), placement=placement)
    if kind == "frozen":
        tuning = shardwise.Freeze(trainable_layers=1)
    sharding = shardwise.Sharding()
    if kind == "replicas":
        mesh = dist.init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("replicate", "shard"))
        sharding = shardwise.Sharding(mesh=mesh)
    return for_trainer(
        shardwise.from_pretrained(place, model_class=auto, dtype=torch.float32, tuning=tuning, sharding=sharding)
    )


def _adapter(run: Run) -> Path:
    """Where the adapter is from which a training begins."""
    kind = run.model.partition(" ")[0]
    return Path(run.folder) / (kind if kind in ("dropping", "copying") else "adapter")


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The environment as torchrun sets it."""
    told = {"RANK": rank(), "LOCAL_RANK": rank(), "WORLD_SIZE": size(), "LOCAL_WORLD_SIZE": size()}
    if size() > 1:
        os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", CI="1")
    yield
    for name in told:
        os.environ.pop(name, None)


def rows_of(run: Run) -> tuple[list[Any], list[Any]]:
    """To train on, and to look at."""

    def row(number: int) -> dict[str, Any]:
        if run.trainer == "dpo":
            return {"prompt": f"What is {number}?", "chosen": f" It is {number}.", "rejected": f" {number + 1}!"}
        if run.trainer == "grpo":
            return {"prompt": f"What is {number}?"}
        ids = [(7 * number + 3 * place) % 200 + 3 for place in range(8)]
        if run.model == "classes":
            return {"input_ids": ids, "labels": number % 3}
        if run.model == "vision":
            values = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(number))
            return {"input_ids": [259] * 4 + ids, "labels": [-100] * 4 + ids, "pixel_values": values.tolist()}
        return {"input_ids": ids, "labels": ids}

    return [row(number) for number in range(ROWS)], [row(100 + number) for number in range(4)]


def made(run: Run) -> Any:
    """The trainer."""
    import datasets
    import transformers

    from shardwise.integrations.trainer import ShardwiseTrainer

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    kinds: Any = transformers
    names = {"trainer": ("Trainer", "TrainingArguments")}
    if run.trainer != "trainer":
        import trl

        kinds = trl
        names = {kind: (f"{kind.upper()}Trainer", f"{kind.upper()}Config") for kind in ("sft", "dpo", "grpo")}
    kind, arguments = (getattr(kinds, name) for name in names[run.trainer])
    if run.by == "shardwise":
        kind = type("Mine", (ShardwiseTrainer, kind), {})
    model = bring_up(run)
    train_rows, other_rows = rows_of(run)
    batches = {f"per_device_{kind}_batch_size": 4 // size() for kind in ("train", "eval")}
    given: dict[str, Any] = ARGUMENTS | batches | run.arguments
    others: dict[str, Any] = {}
    if run.trainer != "trainer":
        others["processing_class"] = tiny.tokenizer()
    if run.trainer == "dpo" and not run.model.endswith("lora"):
        others["ref_model"] = bring_up(run)
    if run.trainer == "grpo":
        others["reward_funcs"] = rewarded
        given |= {"num_generations": 2, "max_completion_length": 5}
    if run.trainer != "grpo":
        others["eval_dataset"] = datasets.Dataset.from_list(other_rows)
    if run.model == "vision":
        others["data_collator"] = transformers.default_data_collator
    return kind(
        model=model,
        args=arguments(**given),
        train_dataset=datasets.Dataset.from_list(train_rows),
        callbacks=[_ending(run)],
        **others,
    )


def rewarded(completions: list[str], **_others: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def _ending(run: Run) -> Any:
    from transformers import TrainerCallback

    def end(self: Any, args: Any, state: Any, control: Any, **_others: Any) -> None:
        if state.global_step != run.dies_at or (run.on_rank is not None and rank() != run.on_rank):
            return
        if run.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if run.end == "save":
            control.should_save = True
            return
        if run.end == "stop":
            control.should_training_stop = True
            return
        raise OSError("the tracker is gone")

    if run.event.startswith("in "):
        _die_while_saving(run)
        return TrainerCallback()
    return type("Ending", (TrainerCallback,), {run.event: end})()


def _die_while_saving(run: Run) -> None:
    """Have this process killed at a step of a save."""
    from shardwise.checkpoints.checkpointer import Checkpointer
    from shardwise.integrations import trainer_checkpoints

    step, _, when = run.event.removeprefix("in ").partition(" ")
    owner: Any = Checkpointer if step == "state" else trainer_checkpoints
    name = {"state": "save", "begin": "_begin", "remove": "_remove"}.get(step, step)
    own = getattr(owner, name)

    def dying(*given: Any, **keywords: Any) -> Any:
        where = f"checkpoint-{run.dies_at if step != 'remove' else 2}"
        is_due = any(where in str(item) for item in given) or given[1:2] == (run.dies_at,)
        if is_due and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_due and step == "remove":  # in the midst of it
            os.unlink(given[0] / "shardwise.trainer.json")
            os.kill(os.getpid(), signal.SIGKILL)
        done = own(*given, **keywords)
        if is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(owner, name, dying)


def train(run: Run) -> Outcome:
    """One training, on this rank."""
    torch.manual_seed(0)
    with launched():
        trainer = made(run)
        if run.evaluates_first:
            trainer.evaluate()
            if run.by == "shardwise":
                assert all(isinstance(item, DTensor) for item in trainer.model.parameters()), "shards again"
        trainer.train(resume_from_checkpoint=run.resume, **run.keywords)
        history = trainer.state.log_history
        model = trainer.model
        weights = {
            name: (item.full_tensor() if isinstance(item, DTensor) else item).detach().clone()
            for name, item in model.named_parameters()
            if item.requires_grad
        }
        generated: list[int] = []
        if run.asks_for == "generation":
            prompt = torch.tensor([[5, 6, 7, 8]])
            generated = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)[0].tolist()
        if run.asks_for == "save":
            trainer.save_model(str(Path(trainer.args.output_dir) / "last"))
            trainer.save_model()
        return Outcome(
            [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry],
            [entry["eval_loss"] for entry in history if "eval_loss" in entry],
            weights,
            generated,
            trainer.state.global_step,
            trainer.state.best_model_checkpoint,
        )


def caught(run: Run) -> str:
    """The error of a training that is refused, or comes to grief."""
    try:
        train(run)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if run.tells and rank() == 0:
            Path(run.tells).write_text(told)
        return told
    return ""


def warned(run: Run) -> tuple[Outcome, list[str]]:
    """One training, on this rank, and the warnings of shardwise."""
    with unittest.TestCase().assertLogs("shardwise", "WARNING") as logs:
        return train(run), logs.output


def train_by_metric(run: Run) -> tuple[int, float, list[float], list[bool]]:
    """Train by a metric that rises on the first rank alone, with a callback that runs the model.

    Returns the steps, the best metric, the last learning rates, and whether all parameters were sharded before each
    micro-batch, and had no gradient before the first of a step.
    """
    from transformers import EarlyStoppingCallback, TrainerCallback

    are_sharded: list[bool] = []
    metrics = itertools.count(1) if rank() == 0 else itertools.repeat(0)

    class RunsModel(TrainerCallback):
        def on_evaluate(self, *_: Any, model: Any, **__: Any) -> None:
            with torch.no_grad():
                model(input_ids=torch.tensor([[5, 6, 7]]))

        on_optimizer_step = on_evaluate

    with launched():
        trainer = made(run)
        compute_loss, evaluate = trainer.compute_loss, trainer.evaluate

        def compute(model: Any, *given: Any, **others: Any) -> Any:
            if model.training:
                is_first = len(are_sharded) % 2 == 0
                shards = [item for item in model.parameters() if isinstance(item, DTensor)]
                is_ready = not is_first or all(item.grad is None for item in shards)
                are_sharded.append(is_ready and len(shards) == len(list(model.parameters())))
            return compute_loss(model, *given, **others)

        def evaluate_anew(*given: Any, **others: Any) -> Any:
            return evaluate(*given, **others) | {"eval_score": trainer.state.global_step if rank() == 0 else 0.0}

        trainer.compute_loss, trainer.evaluate = compute, evaluate_anew
        trainer.compute_metrics = lambda _: {"score": next(metrics)}
        trainer.add_callback(EarlyStoppingCallback(2))
        trainer.add_callback(RunsModel())
        trainer.train()
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        return trainer.state.global_step, trainer.state.best_metric, rates, are_sharded


def compared(ours: Any, theirs: Any, run: Run, place: Path, by: str = "shardwise") -> Outcome:
    """Train on ranks through us, and on others without; both have to come to the same."""
    found = ours.run(train, run.but(by=by, arguments={"output_dir": str(place / "ours"), **run.arguments}))
    expected = theirs.run(
        train, run.but(by="nobody", arguments={"output_dir": str(place / "theirs"), **run.arguments})
    )
    for outcome in found:
        require_same(outcome, expected[0])
    return found[0]


def require_same(found: Outcome, expected: Outcome, relative: float = 1e-6) -> None:
    """Losses and norms within ``relative`` of themselves, weights within what that leaves."""
    assert len(found.steps) == len(expected.steps) > 0
    for (loss, norm), (other_loss, other_norm) in zip(found.steps, expected.steps, strict=True):
        assert abs(loss - other_loss) <= relative * max(abs(other_loss), 1e-2), (found.steps, expected.steps)
        assert abs(norm - other_norm) <= 10 * relative * other_norm, (found.steps, expected.steps)
    assert len(found.evaluated) == len(expected.evaluated)
    for value, other in zip(found.evaluated, expected.evaluated, strict=True):
        assert abs(value - other) <= relative * abs(other)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in found.weights.items():
        if "k_proj.bias" in name:  # its gradient is zero but for rounding, which Adam makes large
            continue
        torch.testing.assert_close(value, expected.weights[name], rtol=1e-4, atol=1e-5, msg=name)
    assert found.generated == expected.generated
