"""Generation of one answer, to try a model or an adapter."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer

from shardwise.core.errors import FormatError
from shardwise.files.checkpoint_index import parse_object
from shardwise.files.peft_adapter import ADAPTER_CONFIG
from shardwise.files.urls import without_secrets
from shardwise.loading.from_pretrained import from_pretrained
from shardwise.models.tunings import ExistingLora, Full, Tuning


def generate(name_or_path: str, prompt: str, *, max_new_tokens: int) -> str:
    """Return the greedy answer of a model or an adapter. Memory: the whole model, in its stored dtype.

    Args:
        name_or_path: a folder, hub id or URL of a model, or a folder with an adapter, whose config names the base.
        prompt: a user's message if the tokenizer has a chat template, otherwise a text to continue.
        max_new_tokens: the most tokens to generate.

    Raises:
        FormatError: the adapter names no base, or there is no tokenizer.
        ShardwiseError: the model cannot be loaded.
    """
    base, tuning = name_or_path, cast(Tuning, Full())
    if (config := Path(name_or_path, ADAPTER_CONFIG)).is_file():
        found = parse_object(config.read_bytes(), what=str(config)).get("base_model_name_or_path")
        if not isinstance(found, str) or not found:
            raise FormatError(f"{config}: has no base_model_name_or_path. Add the folder or hub id of the base")
        base, tuning = found, ExistingLora(name_or_path)
    model: Any = from_pretrained(base, tuning=tuning, dtype="auto").eval()
    has_own = Path(name_or_path, "tokenizer_config.json").is_file()
    source = name_or_path if has_own else base
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{without_secrets(source)}: its tokenizer cannot be loaded. Save one with it") from error
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():  # transformers makes an empty tokenizer for some folders without one
        raise FormatError(f"{without_secrets(source)}: its tokenizer has no token for the prompt. Save one with it")
    inputs = inputs.to(model.device)
    with torch.no_grad():
        answer = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
