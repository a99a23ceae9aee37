"""Vision-language models so small that a test can train them, their processors and rows; trainings by TRL alone.

The processors are those of transformers with Pillow. Qwen's also take videos, for which they need torchvision. Here
they are subclasses without.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from tests.training import on_ranks, tiny
from torch import nn
from transformers import (
    AutoProcessor,
    CLIPImageProcessorPil,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    TrainerCallback,
)

from shardwise.core.errors import ShardwiseError
from shardwise.training import trl_objects
from shardwise.training.run_outcome import TrlOutcome

_FIRST = 259
"""Id of the first token after those of ``tiny.tokenizer``."""


class ImagesQwen25Processor(Qwen2_5_VLProcessor):
    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


class ImagesQwen3Processor(Qwen3VLProcessor):
    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


# In each process that loads one of them by name.
AutoProcessor.register(Qwen2_5_VLConfig, ImagesQwen25Processor, exist_ok=True)
AutoProcessor.register(Qwen3VLConfig, ImagesQwen3Processor, exist_ok=True)


def template(image: str) -> str:
    """A chat template that writes this for each image, and marks what the assistant says."""
    parts = "{%- for part in m.content %}{{- IMAGE if part.type == 'image' else part.text }}{%- endfor %}"
    parts = parts.replace("IMAGE", repr(image))
    return (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.role == 'assistant' %}{% generation %}" + parts + "{{- '<|im_end|>' }}{% endgeneration %}"
        "{%- else %}" + parts + "{{- '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


def _tokenizer(*added: str, **named: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer with more tokens, of which some are attributes."""
    made = tiny.tokenizer(None)
    made.add_special_tokens({"additional_special_tokens": [*added, *named.values()]})
    for name, token in named.items():
        made.init_kwargs.setdefault("extra_special_tokens", {})[name] = token
        made._set_model_specific_special_tokens({name: token})
    return made


_SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.1,
}
_QWEN_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "initializer_range": 0.1,
}


def _mrope(**further: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4, **further}}


def _qwen(kind: Any, config: type, model: type, text: dict[str, Any], tower: dict[str, Any]) -> Any:
    tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    images = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 512}
    )
    processor = kind(
        images, _tokenizer(*tokens), chat_template=template("".join([tokens[0], tokens[2], tokens[1]]))
    )
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: _FIRST + number for number, name in enumerate(names)}
    return model(config(text_config={**_SIZES, **text}, vision_config={**_QWEN_TOWER, **tower}, **ids)), processor


def _qwen25() -> tuple[PreTrainedModel, ProcessorMixin]:
    tower = {"window_size": 16, "fullatt_block_indexes": [1]}
    return _qwen(ImagesQwen25Processor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, _mrope(), tower)


def _qwen3() -> tuple[PreTrainedModel, ProcessorMixin]:
    text = {"head_dim": 16, **_mrope(mrope_interleaved=True)}
    tower = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _qwen(ImagesQwen3Processor, Qwen3VLConfig, Qwen3VLForConditionalGeneration, text, tower)


def _gemma3() -> tuple[PreTrainedModel, ProcessorMixin]:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = Gemma3Processor(
        images, _tokenizer(**named), chat_template=template("<start_of_image>"), image_seq_length=4
    )
    text = {**_SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512}
    ids = {"boi_token_index": _FIRST, "eoi_token_index": _FIRST + 1, "image_token_index": _FIRST + 2}
    config = Gemma3Config(text_config=text, vision_config=_TOWER, mm_tokens_per_image=4, **ids)
    return Gemma3ForConditionalGeneration(config), processor


def _llava() -> tuple[PreTrainedModel, ProcessorMixin]:
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        images,
        _tokenizer("<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>"),
    )
    tower = {"model_type": "clip_vision_model", **_TOWER, "projection_dim": 16}
    text = {"model_type": "llama", **_SIZES}
    config = LlavaConfig(text_config=text, vision_config=tower, image_token_index=_FIRST, image_seq_length=16)
    return LlavaForConditionalGeneration(config), processor


def _idefics3() -> tuple[PreTrainedModel, ProcessorMixin]:
    """The shape of SmolVLM, whose own processor needs torchvision."""
    tokens = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    edge = {"longest_edge": 16}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge)
    processor = Idefics3Processor(images, _tokenizer(*tokens), image_seq_len=4, chat_template=template("<image>"))
    text = {"model_type": "llama", **_SIZES}
    config = Idefics3Config(
        text_config=text, vision_config=_TOWER, image_token_id=_FIRST + 1, scale_factor=2, pad_token_id=0
    )
    return Idefics3ForConditionalGeneration(config), processor


@dataclass(frozen=True)
class VisionModel:
    """A vision-language model, and the names of its parts."""

    make: Callable[[], tuple[PreTrainedModel, ProcessorMixin]]
    tower: str
    projector: str
    text: tuple[str, ...] = ("model.language_model", "lm_head")


MODELS: Mapping[str, VisionModel] = {
    "qwen2_5_vl": VisionModel(_qwen25, "model.visual", "model.visual.merger"),
    "qwen3_vl": VisionModel(_qwen3, "model.visual", "model.visual.merger"),
    "gemma3": VisionModel(_gemma3, "model.vision_tower", "model.multi_modal_projector"),
    "llava": VisionModel(_llava, "model.vision_tower", "model.multi_modal_projector"),
    "idefics3": VisionModel(_idefics3, "model.vision_model", "model.connector", ("model.text_model", "lm_head")),
}


def write(folder: Path, name: str) -> Path:
    """Write a model with its processor."""
    torch.manual_seed(3)
    model, processor = MODELS[name].make()
    model.save_pretrained(folder / name)
    processor.save_pretrained(folder / name)
    return folder / name


def write_rows(folder: Path, count: int = 16) -> None:
    """Write images of different sizes, ``chats.jsonl``, ``answers.jsonl`` and ``pairs.jsonl`` with one or two each.

    Of chats some have a place for each image, and others text alone, before which TRL puts the images.
    """
    random = np.random.default_rng(0)
    rows: dict[str, list[dict[str, Any]]] = {"chats": [], "answers": [], "pairs": []}
    for number in range(count):
        images = []
        for index in range(1 + number % 2):
            pixels = random.integers(0, 256, (16, 16 + 8 * (number % 3), 3), dtype=np.uint8)
            images.append(str(folder / f"{number}-{index}.png"))
            Image.fromarray(pixels).save(images[-1])
        places: list[Any] = [{"type": "image"} for _ in images]
        asked = [{"role": "user", "content": [*places, {"type": "text", "text": f"What is {number}?"}]}]
        good, bad = (_said(text) for text in (f"It is {number}" + "!" * number, "No" + "." * (number % 5)))
        rows["chats"].append({"messages": [*asked, *good], "images": images})
        question = [{"role": "user", "content": f"What is {number}?"}]
        spoken = [{"role": "assistant", "content": good[0]["content"][0]["text"]}]
        rows["answers"].append({"prompt": question, "completion": spoken, "image": images[0]})
        rows["pairs"].append({"prompt": asked, "chosen": good, "rejected": bad, "images": images})
    for name, written in rows.items():
        tiny.write_rows(folder / f"{name}.jsonl", *written)


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def by_trl(values: dict[str, Any], adapter: Path | None = None, trained: Sequence[str] = ()) -> list[float]:
    """Train by TRL in this process; the losses of all steps."""
    return on_ranks.by_trl(values, adapter, trained)


def train(values: dict[str, Any]) -> tuple[TrlOutcome, list[float]]:
    """Train on this rank; what came of it, and the losses of all steps."""
    return on_ranks.train(values)


def train_until(values: dict[str, Any], step: int) -> TrlOutcome:
    """Train on this rank, and have the first one sent SIGTERM in a step."""
    return on_ranks.train_until(values, step)


def error(values: dict[str, Any], *, before_the_model: bool = True) -> str:
    """Train on this rank; the error."""
    load = AssertionError("the model is loaded") if before_the_model else trl_objects.load_model
    try:
        with mock.patch.object(trl_objects, "load_model", side_effect=load):
            on_ranks.train(values)
    except ShardwiseError as raised:
        return str(raised)
    return ""


class Watch(TrainerCallback):
    """Notes which parameters have gradients and optimizer states, and whether a tower computes any."""

    def __init__(self, tower: str) -> None:
        self.tower = tower
        self.outputs: list[bool] = []
        """Whether the output of the last block of the tower required gradients, in each pass."""
        self.gradients: set[str] = set()
        self.states: set[str] = set()

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        blocks = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
        [block] = [name for name in blocks if self.tower in name and name.endswith((".blocks", ".layers"))]
        model.get_submodule(f"{block}.1").register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self.outputs.append(output.requires_grad)

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.gradients |= {name for name, each in model.named_parameters() if each.grad is not None}

    def on_step_end(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
        names = {each: name for name, each in model.named_parameters()}
        self.states |= {names[each] for each in optimizer.state}


def watch(values: dict[str, Any], tower: str) -> tuple[set[str], set[str], list[bool]]:
    """Train on this rank; names of parameters with gradients, with states, and what the tower's output required."""
    callback = Watch(tower)
    on_ranks.train_with(values, callback)
    return callback.gradients, callback.states, callback.outputs
