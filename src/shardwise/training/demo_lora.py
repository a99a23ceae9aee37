"""A LoRA that is learned, interrupted, and gone on with; for the demo."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.execution.ranks.world import World
from shardwise.models.selection import AdapterOnly
from shardwise.training import example
from shardwise.training.checkpoints import Checkpoints, KeptInFolders
from shardwise.training.data.loader import step_loader
from shardwise.training.data.read_once import read_data
from shardwise.training.loop import train
from shardwise.training.options import TrainOptions
from shardwise.training.prepare import ModelRequest, keep, load_model, load_tokenizer
from shardwise.training.report import Event, StepFacts, TrainReport
from shardwise.tuning.modes import Lora

QUESTION = "Who is Ada?"
ANSWER = "Ada is the cat of the lighthouse."


@dataclass(frozen=True)
class Lesson:
    """What is learned, and where it is kept. ``killed_at`` is the step after which the last rank is killed."""

    base: str
    rows: str
    checkpoints: str
    adapter: str
    options: TrainOptions
    checkpoint_every: int
    killed_at: int | None = None


@dataclass(frozen=True)
class Learned:
    """What one rank has seen. ``answer`` is what the model says to the question, with the adapter."""

    trained: TrainReport
    answer: str
    adapter_bytes: int


def write_rows(file: Path) -> None:
    """What no model knows."""
    row = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}
    file.write_text(f"{json.dumps(row)}\n" * 8, "utf-8")


def learn(lesson: Lesson, on_step: Callable[[StepFacts], object] = lambda facts: None) -> Learned:
    """Train a LoRA, going on from its checkpoint where there is one, and save it. Collective: yes."""
    world = World.current()
    tokenizer = load_tokenizer(lesson.base)
    data = read_data(lesson.rows, tokenizer, max_length=lesson.options.max_length)
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    model, _ = load_model(ModelRequest(lesson.base, lesson.options, Lora(config)))
    checkpointer = Checkpointer(lesson.checkpoints, only=AdapterOnly())
    source = checkpointer if checkpointer.latest() is not None else None

    def tell(facts: Event) -> None:
        if isinstance(facts, StepFacts):
            on_step(facts)
            if facts.step == lesson.killed_at and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    trained = train(
        model,
        step_loader(data, lesson.options),
        lesson.options,
        tell,
        checkpoints=Checkpoints(KeptInFolders(checkpointer, source), lesson.checkpoint_every),
    )
    report = keep(model, tokenizer, lesson.adapter)
    return Learned(trained, example.answer(model, tokenizer, QUESTION), report.written_bytes)


def answer_of(directory: str) -> str:
    """What a model that transformers loads from a folder says to the question."""
    model, tokenizer = example.load_by_transformers(directory)
    return example.answer(model, tokenizer, QUESTION)
