"""For the demo: a small model from nothing, its tokenizer, checkpoint and truth, and a LoRA learned on it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.execution.ranks.world import World
from shardwise.models.selection import AdapterOnly
from shardwise.training.checkpoints import Checkpoints, KeptInFolders
from shardwise.training.data.loader import step_loader
from shardwise.training.data.read_once import read_data
from shardwise.training.loop import train
from shardwise.training.options import TrainOptions
from shardwise.training.prepare import ModelRequest, keep, load_model, load_tokenizer
from shardwise.training.report import Event, StepFacts, TrainReport
from shardwise.training.texts.rows import Chat, read_rows
from shardwise.tuning.modes import Lora

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Qwen3's way of writing a chat, with marks around what the assistant says."""


def train_tokenizer(chats: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on the messages of a JSON lines file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        f"{message['role']}\n{message['content']}"
        for row in read_rows(chats)
        if isinstance(row, Chat)
        for message in row.messages
    ]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """A checkpoint that transformers has written."""

    parameters: int
    """Elements, tied ones once."""
    files: tuple[str, ...]


def write_model(directory: Path, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> WrittenModel:
    """A Qwen3 of random weights with its tokenizer, by transformers' own ``save_pretrained``, in several files."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,  # wider than usual: so small a model then learns in a minute
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with _without_bars():
        model.save_pretrained(directory, max_shard_size="3MB")
        tokenizer.save_pretrained(directory)
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    return WrittenModel(sum(parameter.numel() for parameter in model.parameters()), tuple(files))


def write_truth(directory: Path, file: Path) -> int:
    """Load a checkpoint by transformers alone, in this one process, and keep every value of it in ``file``.

    Returns how many tensors there are.
    """
    with _without_bars():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    truth = {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}
    torch.save(truth, file)
    return len(truth)


def load_by_transformers(directory: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, by transformers alone."""
    with _without_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return model, tokenizer


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a rank found when it compared a sharded model, gathered, with the truth."""

    tensors: int
    parameters: int
    buffers: int
    nbytes: int
    differing: tuple[str, ...]
    """Names of tensors that are not bitwise the same, or that only one of the two has."""


def compare_with_truth(model: nn.Module, file: Path) -> Comparison:
    """Compare every parameter and buffer, whole, bit by bit. Collective: yes, over the model's ranks."""
    truth: Mapping[str, torch.Tensor] = torch.load(file, weights_only=True)
    found = _tensors(model)
    differing = sorted(truth.keys() ^ found.keys())
    nbytes = 0
    for name, tensor in found.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name in truth:
            nbytes += whole.nbytes
            if not _same_bits(whole.detach().cpu(), truth[name]):
                differing.append(name)
    parameters = sum(isinstance(tensor, nn.Parameter) for tensor in found.values())
    return Comparison(len(found), parameters, len(found) - parameters, nbytes, tuple(differing))


def compare_with_transformers(model: nn.Module, directory: Path, file: Path) -> Comparison:
    """Compare a model with what transformers loads of a folder, which is kept in ``file``. Collective: yes."""
    world = World.current()
    world.together(lambda: write_truth(directory, file) if world.rank == 0 else None)
    return compare_with_truth(model, file)


@torch.no_grad()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, *, max_tokens: int = 32
) -> str:
    """What the model says, taking the likeliest token each time. Collective: yes, over the model's ranks."""
    asked: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    device = next(model.parameters()).device
    said: list[int] = []
    for _ in range(max_tokens):
        logits = model(input_ids=torch.tensor([[*asked, *said]], device=device), use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            break
        said.append(token)
    return str(tokenizer.decode(said))


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers' progress bars are off meanwhile."""
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers under all of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(bits[0], bits[1])


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
    return Learned(trained, answer(model, tokenizer, QUESTION), report.written_bytes)


def answer_of(directory: str) -> str:
    """What a model that transformers loads from a folder says to the question."""
    model, tokenizer = load_by_transformers(directory)
    return answer(model, tokenizer, QUESTION)
