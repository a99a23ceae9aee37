"""Trainings of ``shardwise train`` on ranks, and by TRL alone; sent to processes by name."""

import json
import logging
import os
import pkgutil
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import torch
import torch.distributed as dist
import transformers
from peft import get_peft_model, load_peft_weights, set_peft_model_state_dict
from tests.training import tiny
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    CLIPImageProcessorPil,
    LlavaProcessor,
    Qwen3ForCausalLM,
    TrainerCallback,
)

from shardwise.cli.train import apply_environment, run_on_rank
from shardwise.core.errors import ShardwiseError
from shardwise.fsdp.torch_private import get_given_timeout, is_compiled_in_place
from shardwise.integrations import ShardwiseTrainer
from shardwise.ranks import slow_ranks
from shardwise.training import train_model, trl_objects
from shardwise.training.arguments import REWARDED
from shardwise.training.run_config import read_run_config
from shardwise.training.run_outcome import TrlOutcome

COMMON: dict[str, Any] = {
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": "none",
    "bf16": False,
    "save_strategy": "no",
    "learning_rate": 0.01,
    "max_length": 64,
    "disable_tqdm": True,
}


def prepare(folder: Path) -> Path:
    """A model with one output as well, and datasets of every kind."""
    tiny.write_model(folder / "model")
    tiny.write_chats(folder / "chats.jsonl", 24)
    asked = [[{"role": "user", "content": f"What is {n}?"}] for n in range(24)]
    good = [[{"role": "assistant", "content": f"It is {n}."}] for n in range(24)]
    bad = [[{"role": "assistant", "content": "No" + "!" * (n % 5)}] for n in range(24)]
    pairs = [{"prompt": a, "chosen": g, "rejected": b} for a, g, b in zip(asked, good, bad, strict=True)]
    tiny.write_rows(folder / "pairs.jsonl", *pairs)
    triples = [row | {"reference": good[n - 1]} for n, row in enumerate(pairs)]
    tiny.write_rows(folder / "triples.jsonl", *triples)
    answers = [
        {"prompt": a, "completion": g if n % 2 else b, "label": bool(n % 2)}
        for n, (a, g, b) in enumerate(zip(asked, good, bad, strict=True))
    ]
    tiny.write_rows(folder / "labels.jsonl", *answers)
    tiny.write_rows(folder / "prompts.jsonl", *[{"prompt": a} for a in asked])
    return folder


def write_scorer(folder: Path) -> Path:
    """A model with a head of one output, for rewards."""
    torch.manual_seed(1)
    made = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    made.save_pretrained(folder / "scorer")
    tiny.tokenizer().save_pretrained(folder / "scorer")
    return folder / "scorer"


def write_teacher(folder: Path) -> Path:
    """A model with other values."""
    made = tiny.model()
    torch.manual_seed(4)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.1)
    made.save_pretrained(folder / "teacher")
    tiny.tokenizer().save_pretrained(folder / "teacher")
    return folder / "teacher"


def write_wide(folder: Path) -> Path:
    """A model whose rows are whole blocks of 64."""
    config = tiny.model().config
    config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.02})
    config.tie_word_embeddings = False
    torch.manual_seed(2)
    Qwen3ForCausalLM(config).save_pretrained(folder / "wide")
    tiny.tokenizer().save_pretrained(folder / "wide")
    return folder / "wide"


def write_vision(folder: Path) -> Path:
    """A model for images, with its processor."""
    from tests.integrations.runs import vision

    sizes = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    template = tiny.MARKED.replace("m.content", "m.content[0].text")  # TRL gives a processor lists of parts
    processor = LlavaProcessor(
        CLIPImageProcessorPil(**sizes), tiny.tokenizer(template), patch_size=4, chat_template=template
    )
    vision().save_pretrained(folder / "vision")
    processor.save_pretrained(folder / "vision")
    return folder / "vision"


def letters(completions: list[Any], **_: Any) -> list[float]:
    """Rewards of GRPO that are different for nearly all answers."""
    return [float(sum(map(ord, one[0]["content"])) % 97) for one in completions]


def share_of_ascii(completions: list[Any], **_: Any) -> list[float]:
    """Rewards of GRPO that a model learns to get: the share of characters that are ASCII."""
    texts = [one[0]["content"] for one in completions]
    return [sum(letter.isascii() for letter in text) / max(len(text), 1) for text in texts]


SAMPLING = frozenset([*REWARDED, "distillation"])
"""Methods that sample answers."""


def quantile(probabilities: torch.Tensor, num_samples: int, **_: Any) -> torch.Tensor:
    """Stand in for ``torch.multinomial``: the two answers to a prompt differ, and are the same on any ranks."""
    at = torch.tensor([0.3, 0.7], device=probabilities.device).repeat(len(probabilities) // 2)[:, None]
    return (probabilities.cumsum(1) < at).sum(1, keepdim=True).clamp(max=probabilities.shape[1] - 1)


def words(values: dict[str, Any]) -> list[str]:
    """A command line that sets these keys; those of None are left out."""
    values = {key: value for key, value in values.items() if value is not None}
    method = [values["method"]] if "method" in values else []
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return method + [f"--{key}={text}" for key, text in texts.items() if key != "method"]


def train(values: dict[str, Any]) -> tuple[TrlOutcome, list[float]]:
    """Train on this rank; what came of it, and the losses of all steps."""
    with mock.patch.object(torch, "multinomial", quantile) if values.get("method") in SAMPLING else nullcontext():
        outcome = run_on_rank(apply_environment(read_run_config(words({**COMMON, **values}))))
    return outcome, [entry["loss"] for entry in outcome.history if "loss" in entry]


def train_without_upload(values: dict[str, Any]) -> tuple[TrlOutcome, list[float]]:
    """Train on this rank with ``push_to_hub``. An upload is an error."""
    upload = mock.patch.object(ShardwiseTrainer, "push_to_hub", side_effect=AssertionError("uploaded"))
    with mock.patch.object(transformers.Trainer, "init_hf_repo"), upload:
        return train({**values, "push_to_hub": True, "hub_strategy": "end"})


def train_file(method: str, file: str) -> tuple[list[float], list[float]]:
    """Train on this rank from a file; the losses and the norms of the gradients of all steps."""
    with mock.patch.object(torch, "multinomial", quantile) if method in SAMPLING else nullcontext():
        outcome = run_on_rank(apply_environment(read_run_config([method, file])))
    steps = [entry for entry in outcome.history if "loss" in entry]
    return [entry["loss"] for entry in steps], [entry["grad_norm"] for entry in steps]


def errors_of(values: dict[str, Any], differing: list[dict[str, Any]]) -> list[str]:
    """Train once for each of these keys, which only the second rank has; the errors."""
    return errors_of_all([{**values, **(keys if dist.get_rank() else {})} for keys in differing])


def errors_of_all(cases: list[dict[str, Any]]) -> list[str]:
    """Train by each of these configurations in turn; the errors."""
    errors = []
    for values in cases:
        try:
            train(values)
        except ShardwiseError as error:
            errors.append(str(error))
    return errors


def train_on_own_rows(values: dict[str, Any], second: str) -> None:
    """Train on this rank, where the second rank has another file under the name of the dataset."""
    load = datasets.load_dataset

    def load_own(*positional: Any, data_files: Any, **keywords: Any) -> Any:
        return load(*positional, data_files=second if dist.get_rank() else data_files, **keywords)

    with mock.patch.object(datasets, "load_dataset", load_own):
        train(values)


def warnings_of_a_slow_rank(values: dict[str, Any], kind: str, named: str, warned: str) -> list[str]:
    """Train, where the second rank takes long in its second step, until the first one has said what it waits for.

    On a busy machine the first rank may have waited before, for something else.
    """

    class Warned(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            if named in messages[-1]:
                Path(warned).touch()

    class Slow(TrainerCallback):
        def on_train_begin(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
            if kind == "collator":
                train_dataloader.base_dataloader.collate_fn = self.call(train_dataloader.base_dataloader.collate_fn)

        def on_log(self, *positional: Any, **_: Any) -> None:
            if kind == "tracker" and positional[1].global_step == 2:
                self.wait()

        def call(self, original: Any) -> Any:
            steps = iter(range(1, 99))

            def call(*positional: Any, **keywords: Any) -> Any:
                if next(steps) == 2:
                    self.wait()
                return original(*positional, **keywords)

            return call

        def wait(self) -> None:
            while dist.get_rank() == 1 and not Path(warned).exists():
                time.sleep(0.01)

    messages: list[str] = []
    slow, handler = Slow(), Warned(logging.WARNING)
    logging.getLogger("shardwise").addHandler(handler)
    with mock.patch.object(slow_ranks, "WARN_S", 1.0):
        train_with(values, slow)
    logging.getLogger("shardwise").removeHandler(handler)
    return messages


def error_without_record(values: dict[str, Any], step: int) -> str:
    """Train on this rank, and have the first one remove the record of the training in a step; the error."""

    class Removes(TrainerCallback):
        def on_step_begin(self, *positional: Any, **_: Any) -> None:
            if positional[1].global_step + 1 == step and positional[1].is_world_process_zero:
                shutil.rmtree(values["output_dir"])

    try:
        train_with(values, Removes())
    except ShardwiseError as error:
        return str(error)
    return ""


def train_until_refused(values: dict[str, Any], refused: str) -> tuple[TrlOutcome, list[float]]:
    """Train on this rank, with no step before another training is refused. One that is refused writes a file."""
    train_by_transformers = transformers.Trainer.train

    def wait(*positional: Any, **keywords: Any) -> Any:
        while not Path(refused).exists():
            time.sleep(0.01)
        return train_by_transformers(*positional, **keywords)

    try:
        with mock.patch.object(transformers.Trainer, "train", wait):
            return train(values)
    except Exception:
        Path(refused).touch()
        raise


def first_rows(cases: list[dict[str, Any]]) -> list[tuple[bool, dict[str, list[int]]]]:
    """For each configuration, whether TRL is to mask the dataset, and its first row."""
    found = []
    for values in cases:
        arguments = trl_objects.parse(read_run_config(words({**COMMON, **values})))
        rows, _ = trl_objects.load_data(arguments, trl_objects.load_processor(arguments), 0)
        found.append((arguments.training.assistant_only_loss, next(iter(rows))))
    return found


def shares_of_reference(values: dict[str, Any]) -> list[dict[str, tuple[int, int]]]:
    """Train on this rank; the elements of each parameter of the reference, and those that this rank holds.

    Before the first step, and after the last. ``ddp_timeout`` holds for a process group of the reference's mesh.
    """
    train_by_transformers, load_frozen = transformers.Trainer.train, trl_objects.load_frozen
    found, groups = [], []

    def load_with_group(*positional: Any) -> Any:
        groups.append(dist.new_group())
        return load_frozen(*positional)

    def look(trainer: Any, *positional: Any, **keywords: Any) -> Any:
        assert get_given_timeout(groups[0]) == values["ddp_timeout"]
        found.append(_shares(trainer.ref_model))
        done = train_by_transformers(trainer, *positional, **keywords)
        found.append(_shares(trainer.ref_model))
        return done

    loading = mock.patch.object(trl_objects, "load_frozen", load_with_group)
    with loading, mock.patch.object(transformers.Trainer, "train", look):
        train(values)
    return found


def train_with_shares(values: dict[str, Any]) -> tuple[TrlOutcome, dict[str, tuple[int, int]]]:
    """Train on this rank; what came of it, and :func:`_shares` of the reference and the reward model after it."""
    train_by_transformers, found = transformers.Trainer.train, dict[str, tuple[int, int]]()

    def look(trainer: Any, *positional: Any, **keywords: Any) -> Any:
        done = train_by_transformers(trainer, *positional, **keywords)
        frozen = [getattr(trainer, "ref_model", None), *getattr(trainer, "reward_funcs", ())]
        for model in frozen:
            if isinstance(model, torch.nn.Module):
                assert not any(parameter.requires_grad for parameter in model.parameters())
                found.update({f"{type(model).__name__}.{name}": held for name, held in _shares(model).items()})
        return done

    with mock.patch.object(transformers.Trainer, "train", look):
        return train(values)[0], found


def _shares(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {
        name: (each.numel(), (each.to_local() if isinstance(each, DTensor) else each).numel())
        for name, each in model.named_parameters()
    }


class Terminated(TrainerCallback):
    """Sends this process SIGTERM in a step, on the first rank."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, *positional: Any, **_: Any) -> None:
        state = positional[1]
        if state.global_step + 1 == self.step and state.is_world_process_zero:
            os.kill(os.getpid(), self.number)


class TerminatedInEvaluation(Terminated):
    """Sends it in the evaluation of a step."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def on_prediction_step(self, *positional: Any, **_: Any) -> None:
        state = positional[1]
        if state.global_step == self.step and state.is_world_process_zero:
            self.step = -1  # once
            os.kill(os.getpid(), self.number)


def train_until(values: dict[str, Any], step: int, number: int = signal.SIGTERM) -> TrlOutcome:
    """Train on this rank, and have the first one sent a signal in a step."""
    return train_with(values, Terminated(step, number))


def train_with(values: dict[str, Any], callback: TrainerCallback) -> TrlOutcome:
    """Train on this rank, with a callback."""
    make = trl_objects.make_trainer

    def with_callback(*positional: Any) -> Any:
        trainer = make(*positional)
        trainer.add_callback(callback)
        return trainer

    with mock.patch.object(trl_objects, "make_trainer", with_callback):
        return train(values)[0]


def train_compiled(values: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank; the losses, which modules were compiled in place, what else was, and warnings."""
    original, blocks, others = torch.compile, list[str](), list[str]()
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]

    class Looking(TrainerCallback):
        def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
            blocks.extend(name for name, module in model.named_modules() if is_compiled_in_place(module))

    def note(function: Any = None, *positional: Any, **keywords: Any) -> Any:
        if isinstance(function, torch.nn.Module):
            others.append(type(function).__name__)
        return original(function, *positional, **keywords)

    logging.getLogger("shardwise").addHandler(handler)
    with mock.patch.object(torch, "compile", note):
        outcome = train_with(values, Looking())
    logging.getLogger("shardwise").removeHandler(handler)
    losses = [entry["loss"] for entry in outcome.history if "loss" in entry]
    return {"losses": losses, "blocks": blocks, "others": others, "warnings": messages}


def train_with_tracker(values: dict[str, Any]) -> tuple[TrlOutcome, list[dict[str, float]], int]:
    """Train on this rank; what came of it, what a tracker was sent of memory, and how often it was estimated."""

    class Tracker(TrainerCallback):
        __module__ = "transformers.integrations.own"

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            sent.append({name: value for name, value in logs.items() if name.startswith("memory/")})

    sent: list[dict[str, float]] = []
    estimated = Path(values["output_dir"], "estimated")

    def estimate(*_: Any) -> None:
        time.sleep(0.5)
        estimated.touch()
        raise ShardwiseError("none")

    device = mock.patch.object(train_model, "accelerator", return_value=torch.device("cuda"))
    with device, mock.patch.object(train_model, "plan_run", side_effect=estimate) as plan_run:
        outcome = train_with(values, Tracker())
        assert estimated.exists(), "each rank leaves after the estimate"
    return outcome, [metrics for metrics in sent if metrics], plan_run.call_count


def size_of_png(path: Path) -> tuple[int, int]:
    """Return width and height in pixels."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def warnings_without_matplotlib(values: dict[str, Any]) -> list[str]:
    """Train on this rank, and return the messages that are logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        train(values)
    logging.getLogger("shardwise").removeHandler(handler)
    return messages


def by_trl(values: dict[str, Any], adapter: Path | None = None, trained: Sequence[str] = ()) -> list[float]:
    """Train by TRL in this process, without shardwise; the losses of all steps."""
    return [entry["loss"] for entry in log_by_trl(values, adapter, trained) if "loss" in entry]


def log_by_trl(
    values: dict[str, Any], adapter: Path | None = None, trained: Sequence[str] = ()
) -> list[dict[str, float]]:
    """Train by TRL in this process, without shardwise; what it has logged.

    A LoRA begins with the stored values of an adapter. Of a full model, all or these modules are trained.
    """
    from trl.trainer.utils import get_peft_config

    config = read_run_config(words({**COMMON, **values}))
    arguments = trl_objects.parse(config)
    kind = trl_objects.trl_class(config.method, "Trainer")
    rows = datasets.load_dataset("json", data_files=values["dataset_name"])["train"]
    others: dict[str, Any] = {}
    if config.method in REWARDED:
        names = arguments.script.reward_funcs
        others["reward_funcs"] = [
            name if "/" in name else pkgutil.resolve_name(name if "." in name else f"trl.rewards.{name}")
            for name in names
        ]
    if config.method == "distillation":
        others["teacher_model"] = arguments.training.teacher_model_name_or_path
    maker = partial(_with_stored_values, adapter)
    model = arguments.model.model_name_or_path
    processor = AutoProcessor.from_pretrained(model)
    if trained:
        model = AutoModelForImageTextToText.from_pretrained(model, dtype="float32")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(f"{module}." for module in trained)))
    with (
        mock.patch.object(sys.modules[kind.__module__], "get_peft_model", maker) if adapter else nullcontext(),
        mock.patch.object(torch, "multinomial", quantile) if config.method in SAMPLING else nullcontext(),
    ):
        trainer = kind(
            model=model,
            args=arguments.training,
            train_dataset=rows,
            processing_class=processor,
            peft_config=get_peft_config(arguments.model),
            **others,
        )
        trainer.train()
    return list(trainer.state.log_history)


def _with_stored_values(adapter: Path, *positional: Any, **keywords: Any) -> Any:
    made = get_peft_model(*positional, **keywords)
    set_peft_model_state_dict(made, load_peft_weights(str(adapter), device="cpu"))
    return made


def by_script(file: Path, place: Path, adapter: Path | None = None) -> None:
    """Run TRL's script for SFT in this process and a folder. A LoRA begins with stored values."""
    from trl.trainer import sft_trainer

    dist.destroy_process_group()
    place.mkdir()
    os.chdir(place)
    maker = partial(_with_stored_values, adapter) if adapter else get_peft_model
    with (
        mock.patch.object(sft_trainer, "get_peft_model", maker),
        mock.patch.object(sys, "argv", ["sft.py", "--config", str(file)]),
    ):
        runpy.run_module("trl.scripts.sft", run_name="__main__")


def by_command(words: list[str], place: Path) -> TrlOutcome:
    """Do on this rank, in a folder, what ``shardwise train`` does on each."""
    place.mkdir(exist_ok=True)
    os.chdir(place)
    return run_on_rank(apply_environment(read_run_config(words)))


def initial_adapter(values: dict[str, Any], folder: str) -> None:
    """Save the adapter that a training begins with."""
    import shardwise

    arguments = trl_objects.parse(read_run_config(words({**COMMON, **values})))
    shardwise.save_adapter(trl_objects.load_model(arguments), folder)
