"""A tokenizer and a Qwen3 so small that a test can train them."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
UNMARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
FORGETFUL = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{- '(thought)' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Writes of the last answer what it leaves out of earlier ones, as templates of reasoning models do."""


def tokenizer(template: str | None = MARKED) -> PreTrainedTokenizerFast:
    """One token for each byte, and three special ones."""
    vocabulary = {text: number for number, text in enumerate([PAD, START, END])}
    vocabulary |= {text: number + 3 for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens([PAD, START, END])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD, chat_template=template)


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **tokens, initializer_range=0.1))


def write_model(folder: Path) -> Path:
    logging.disable_progress_bar()
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_config(folder: Path, name: str = "config", **values: object) -> Path:
    """Of a training of the model on the chats of a folder."""
    given = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "chats.jsonl"),
        "output_dir": "out",
        "learning_rate": "1e-2",
        "max_length": 64,
        "logging_steps": 1,
        "save_strategy": "steps",
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        **values,
    }
    file = folder / f"{name}.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items()))
    return file


def chat(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def pair(number: int) -> dict[str, object]:
    """A preference; of some the rejected answer is the longer one."""
    answers = f"It is {number}.", "No" + "!" * (number % 9)
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
    return {"prompt": [{"role": "user", "content": f"{number}?"}], "chosen": chosen, "rejected": rejected}


def write_rows(file: Path, *rows: object) -> Path:
    """Strings are written as they are, other values as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return file


def write_chats(file: Path, count: int) -> Path:
    """Chats of different lengths."""
    return write_rows(file, *[chat(f"What is {n}?", f"It is {n}" + "!" * n) for n in range(count)])
