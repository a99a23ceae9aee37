"""A small model with its tokenizer for the demo and the examples, created without a network."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
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

CHATS = Path(__file__).with_name("chats.jsonl")
"""Short chats about plain facts."""

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
"""Qwen3's chat template in short, with generation marks."""


def train_tokenizer(chats: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on the messages of a JSON lines file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with chats.open("rb") as file:
        rows = [json.loads(line) for line in file]
    texts = [f"{message['role']}\n{message['content']}" for row in rows for message in row["messages"]]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """A checkpoint written by transformers. ``parameters`` is the number of elements, tied ones once."""

    parameters: int
    files: tuple[str, ...]


def write_model(directory: Path, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> WrittenModel:
    """Write a Qwen3 of random weights and its tokenizer by ``save_pretrained``, in several files."""
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
        initializer_range=0.05,  # larger than usual, so that a small model learns in a minute
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


def load_by_transformers(directory: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer by transformers."""
    with _without_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return model, tokenizer


@torch.no_grad()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, *, max_tokens: int = 32
) -> str:
    """Return an answer by greedy decoding. Collective: yes, over the model's ranks."""
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
    """Disable transformers' progress bars within the block."""
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
