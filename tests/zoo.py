"""Tiny random models of every architecture in the installed transformers.

A loader is only trustworthy when it has been tried on every architecture, and a test cannot download
hundreds of checkpoints. This module makes them: it takes the default configuration of an architecture,
shrinks it until the model has about a hundred thousand parameters, builds the model on the CPU and fills
every stored tensor with random values, distinct from each other, so that a weight which lands in the wrong
place is always seen.

    for specimen in causal_lm_specimens():
        model = build(specimen)
        save_original(model, directory)      # as on the hub: reverse conversion, several files
        save_internal(model, directory)      # the model's own state_dict names

How a configuration is shrunk (`tiny_config`), in this order:

1. ``SIZES`` and ``LISTS`` map field names to small values. They are applied to the default instance of the
   configuration class and to its sub-configurations. Features that are off by default (0, None, -1) stay off,
   and what a configuration derives from its other fields it derives again.
2. Lists with one entry per layer (``layer_types``, ``mlp_layer_types``, ...) are cut to the fewest layers
   that still show each entry, and the layer count follows.
3. Token ids are moved into the small vocabulary, and the lists inside rotary parameters get fitting lengths.
4. ``OVERRIDES`` holds what remains: a few fields for each architecture with rules of its own.

What transformers itself cannot do is listed in ``KNOWN_UPSTREAM``, ``NOT_BUILT`` and ``PREFIXES_UNSUPPORTED``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_PARAMETERS = 3_000_000


class CannotShrink(Exception):
    """No tiny configuration of an architecture could be made."""


@dataclass(frozen=True)
class Specimen:
    """One architecture of the zoo: a configuration (``model_type``) and the model class built from it."""

    name: str
    model_type: str
    class_name: str
    family: str  # "causal-lm" | "vision-language" | "encoder" | "other"


# --------------------------------------------------------------------------------------------- small values

VOCAB = 112
HIDDEN = 64  # 4 heads of 16 where the head size follows from the width
HEADS = 4
KV_HEADS = 2
TOWER_HIDDEN = 48  # width of vision and audio towers: 4 heads of 12
LAYERS = 2
EXPERTS = 4


def _named(sizes: dict[int, str]) -> dict[str, int]:
    """Sizes by the names of their fields."""
    return {name: size for size, names in sizes.items() for name in names.split()}


# Small values -> the fields of text models that take them; 2 are LAYERS or KV_HEADS, 4 HEADS or EXPERTS.
# Heads have 24 dimensions, 4 * 24 != 64: projections are not square where the architecture allows it.
SIZES = _named(
    {
        1: """
            topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace
            num_dense_layers moe_layer_end_index num_global_layers
        """,
        2: """
            type_vocab_size swa_num_key_value_heads index_n_heads o_groups num_experts_per_tok num_experts_per_token
            moe_topk moe_top_k moe_k n_group num_expert_group zero_expert_num linear_num_key_heads mamba_n_groups
            group_detr index_topk_blocks num_key_value_heads num_kv_heads kv_n_heads num_hidden_layers n_layer
            n_layers num_layers decoder_layers encoder_layers num_encoder_layers num_decoder_layers num_blocks depth
            decoder_num_hidden_layers memory_attention_num_layers
        """,
        3: "linear_num_heads num_code_groups",
        4: """
            num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
            encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
            decoder_num_attention_heads index_topk linear_num_value_heads patch_size num_filters upsample_groups
            index_block_size num_experts num_local_experts n_routed_experts moe_num_experts
        """,
        6: """
            swa_num_attention_heads d_rel sliding_window sliding_window_size attention_window_size window_size
            local_attention attention_chunk_size mamba_dt_rank time_step_rank
        """,
        8: """
            rotary_dim qk_rope_head_dim linear_value_head_dim mamba_n_heads mamba_chunk_size chunk_size
            additional_vocab_size num_prototypes
        """,
        10: "num_queries num_detection_tokens",
        12: """
            adapter_rank qk_nope_head_dim index_head_dim o_lora_rank linear_key_head_dim linear_head_dim
            mamba_d_state state_size ssm_state_size codebook_dim vector_quantization_hidden_dimension latent_dim
            loss_weighting_hidden_size duration_delta_embedding_dim memory_encoder_output_channels horizon_length
            global_pointer_head_size
        """,
        16: """
            swa_head_dim rel_extent v_head_dim mamba_d_head image_size num_position_embeddings num_mel_bins
            n_mel_bins mel_vocab_size feature_size frequency_embedding_size output_quantile_len num_depth_bins
            x4_feat_dim
        """,
        20: "max_source_positions hidden_size_per_layer_input shape_embed_dim kv_lora_rank",
        24: """
            pronunciation_embed_dim nemo_conv_channels output_channels downsample_hidden_size fusion_hidden_size
            auxiliary_channels head_dim dim_head d_head kv_channels attention_head_size
        """,
        28: "router_hidden_size",
        32: "original_max_position_embeddings max_img_size codebook_size max_image_size",
        40: """
            embedding_size word_embed_proj_dim input_embedding_size moe_intermediate_size expert_ffn_hidden_size
            ext_pw_out_channel depthwise_separable_out_channel q_lora_rank projection_dim project_dim
            audio_prompt_dim decoder_hidden_size iou_head_hidden_dim
        """,
        48: "decoder_dim audio_hidden_size hidden_dim",
        50: "pronunciation_vocab_size encoder_hash_byte_group_vocab",
        56: """
            output_embedding_size shared_expert_intermediate_size shared_intermediate_size
            shared_experts_intermediate_size moe_shared_expert_intermediate_size share_expert_dim
        """,
        60: "shape_vocab_size",
        64: """
            max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions hidden_size
            d_model n_embd emb_dim embed_dim embedding_dim dim hidden_size_global out_hidden_size output_dim
            text_hidden_size thinker_hidden_size condition_dim encoder_hidden_dim fpn_hidden_size
            memory_attention_hidden_size memory_encoder_hidden_size mask_downsampler_embed_dim
            memory_fuser_embed_dim
        """,
        72: """
            dense_intermediate_size encoder_ffn_dim backbone_hidden_size projection_intermediate_size
            projector_hidden_size decoder_intermediate_size
        """,
        80: "lru_width",
        88: """
            intermediate_size ffn_hidden_size ffn_dim d_inner n_inner dff dim_ff feed_forward_size mlp_dim
            decoder_ffn_dim memory_attention_feed_forward_hidden_size memory_fuser_intermediate_dim
        """,
        104: "intermediate_size_mlp",
        112: "vocab_size vocab_size_per_layer_input",
    }
)

# Field name -> small value, for fields that hold a list.
LISTS: dict[str, list[int]] = {
    "deepstack_visual_indexes": [0, 1],
    "global_attn_indexes": [1],
    "intermediate_layers_indices": [0, 1],
    "vision_feature_layer": [1, 0],
    "downsample_channels": [28, 36],
    "image_size": [16, 16],
    "hidden_sizes": [8, 16, 24, 32],
    "encoder_in_channels": [16, 24, 32],
    "decoder_in_channels": [HIDDEN, HIDDEN, HIDDEN],
    "neck_hidden_sizes": [12, 16, 20, 24],
    "depths": [1, 1, 2, 1],
    "stem_channels": [3, 6, 8],
    "stage_in_channels": [8, 12, 16, 24],
    "stage_mid_channels": [6, 6, 8, 8],
    "stage_out_channels": [12, 16, 24, 32],
    "stage_num_blocks": [1, 1, 2, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "upsample_rates": [2, 2],
    "upsampling_ratios": [2, 2],
}

# What differs in vision and audio towers.
TOWER_SIZES: dict[str, int] = {
    "hidden_size": TOWER_HIDDEN,
    "d_model": TOWER_HIDDEN,
    "embed_dim": TOWER_HIDDEN,
    "intermediate_size": 72,
    "num_key_value_heads": HEADS,
}

# Fields that a configuration derives from others when they are None, and that are set here nevertheless.
FREE_WHEN_DERIVED = {"num_key_value_heads", "head_dim", "num_kv_heads"}

# Lists that have one entry per layer even where no field holds the number of layers.
PER_LAYER_NAMES = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_layers")

HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]

# The backbone of the DETR family: the default one needs timm.
RESNET = {"model_type": "resnet", "out_features": ["stage1", "stage2", "stage3", "stage4"]}

# Arguments without which the default configuration of a model_type cannot be made, or not be built here.
DEFAULTS: dict[str, dict[str, Any]] = {
    "conditional_detr": {"backbone_config": RESNET},
    "deformable_detr": {"backbone_config": RESNET},
    "detr": {"backbone_config": RESNET},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "musicgen": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_decoder"},
    },
    "musicgen_melody": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_melody_decoder"},
    },
    "sapiens2": {"head_config": {"upsample_out_channels": [24, 16]}},
}

# Field values that no table of names can know, by the model_type of the (sub-)configuration they belong to,
# or by "parent_model_type.field" where the same configuration differs from parent to parent.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"use_cache": False},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "cosmos3_edge_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [4, 4, 4],
            "mrope_interleaved": True,
        }
    },
    "esm": {"vocab_size": VOCAB},
    "nemotron_h_omni.vision_config": {"video_temporal_patch_size": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5, "<|visual token 000000|>": 6}},
    "emu3_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 2],
        "attn_resolutions": [1],
        "num_res_blocks": 1,
        "embed_dim": 4,
    },
    "detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "conditional_detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "inkling_vision": {"num_hidden_layers": 4},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [40, 28],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
    },
    "glm5_next_text": {"index_kpool": 2},
    "gradium_phonon_tts": {"num_key_value_heads": HEADS},
    "lw_detr_vit": {
        "image_size": 32,
        "num_windows": 4,
        "num_hidden_layers": 3,
        "window_block_indices": [0, 2],
        "out_indices": [1, 2, 3],
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {"vision_output_dim": 3 * TOWER_HIDDEN},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": HEADS},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": HEADS},
    "nemotron3_diarization_audio": {"num_key_value_heads": HEADS},
    "swin": {"embed_dim": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 3, 4], "window_size": 2},
    "segformer": {"num_attention_heads": [1, 2, 3, 4]},
    "t5gemma2_encoder.text_config": {"dropout_rate": 0.0},
    "dinov2_with_registers": {"use_swiglu_ffn": True},
    "tipsv2_dpt.backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "use_swiglu_ffn": True},
    "tipsv2_vision_model": {"hidden_size": HIDDEN},
    "vibevoice_acoustic_tokenizer_encoder": {"depths": [1, 1, 2], "downsampling_ratios": [2, 2]},
    "qwen3_omni_moe.talker_config": {"spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 56},
    "sapiens2_head": {
        "upsample_out_channels": [24, 16],
        "conv_out_channels": [16, 12],
        "scale_conv_out_channels": [12, 8],
        "scale_final_hidden_sizes": [12, 8],
    },
    "sapiens2": {
        "num_hidden_layers": 3,
        "num_key_value_heads_per_layer": [HEADS, KV_HEADS, HEADS],
        "num_first_full_attention_layers": 1,
        "num_last_full_attention_layers": 1,
        "num_key_value_attention_heads": 2,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]},
        },
    },
    "dbrx.attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "dots1": {
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dots3_note_audio_encoder": {"adapter_input_size": TOWER_HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": TOWER_HIDDEN,
        "adapter_out_dim": HIDDEN,
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": LAYERS,
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 28,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_d_head": 12},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [88] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_assistant.text_config": {"num_kv_shared_layers": LAYERS},
    "gemma4_unified_assistant.text_config": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "helium": {"head_dim": 16},
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
    },
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"]},
    "laguna": {"num_attention_heads_per_layer": [4, 6], "layer_types": ["full_attention", "sliding_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {"moe_layers": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "minimax_m3_vl_text": {"mlp_layer_types": ["dense", "sparse"]},
    "nemotron_h": {"mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 2},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 24,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 12,
        "ple_layer_ids": [1],
        "ple_embed_dim": 48,
        "ngram_vocab_size_base": 20,
        "make_ngram_vocab_size_divisible_by": 8,
        "heads_per_ngram": 2,
        "split_ngram_parts": 3,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [24, 40]},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": HYBRID},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": HYBRID},
    "zaya": {"num_experts_per_tok": 1},
}


# ------------------------------------------------------------------------- what transformers itself cannot do

# Specimens whose checkpoint transformers does not load back as it was saved, and why.
KNOWN_UPSTREAM: dict[str, str] = {
    "zaya": "_init_weights overwrites the last entry of each router's loaded `balancing_biases` with -1"
}

# Specimens that cannot be built at all, and why; `build` raises CannotShrink.
NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower is a timm model: needs timm and pillow",
    "gemma4_assistant": "from 5.23 its text model refuses that all layers share keys and values, "
    "which its configuration insists on",
    "maskformer:MaskFormerForInstanceSegmentation": "its loss, made with the model, needs scipy",
    "timm_wrapper:TimmWrapperForImageClassification": "needs timm and pillow",
}


# Specimens that do not load back from `save_original(..., prefixes=True)`: the model and its base model each
# put the prefix `thinker.` back.
PREFIXES_UNSUPPORTED: set[str] = {
    "qwen2_5_omni_thinker:Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe:Qwen3OmniMoeForConditionalGeneration",
    "qwen3_omni_moe_thinker:Qwen3OmniMoeThinkerForConditionalGeneration",
}


# ------------------------------------------------------------------------------------------- configurations


def _stored(config: PreTrainedConfig, name: str) -> Any:
    """A configuration's own value, also where the values of its layers differ."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _default_of(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _layer_lists(config: PreTrainedConfig) -> dict[str, list]:
    """The lists of a configuration that have one entry per layer."""
    count = getattr(config, "num_hidden_layers", 0)
    lists = {}
    for field in dataclasses.fields(config):
        value = _stored(config, field.name)
        if isinstance(value, (list, tuple)) and field.name not in LISTS and not field.name.startswith("mtp_"):
            per_layer = len(value) == count > LAYERS or field.name in PER_LAYER_NAMES
            if value and per_layer and list(value) != list(range(len(value))):
                lists[field.name] = list(value)
    return lists


def _representative_layers(lists: dict[str, list]) -> list[int]:
    """Indices of the fewest layers (at least two) that show each entry of each list."""
    count = min(map(len, lists.values()))
    wanted = {(name, repr(entry)) for name, entries in lists.items() for entry in entries[:count]}
    chosen: list[int] = []
    while wanted or len(chosen) < min(LAYERS, count):
        rest = [i for i in range(count) if i not in chosen]
        gain = {i: sum((name, repr(entries[i])) in wanted for name, entries in lists.items()) for i in rest}
        best = max(rest, key=lambda i: gain[i])
        chosen.append(best)
        wanted -= {(name, repr(entries[best])) for name, entries in lists.items()}
    return sorted(chosen)


def _is_tower(key: str) -> bool:
    return any(word in key for word in ("vision", "audio", "visual", "image", "speech", "sam_"))


def _shrunk_fields(config: PreTrainedConfig, key: str) -> dict[str, Any]:
    """Constructor arguments of a small configuration like the given default one."""
    from transformers import PreTrainedConfig

    sizes = SIZES | TOWER_SIZES if _is_tower(key) else SIZES
    if _stored(config, "kv_lora_rank"):  # latent attention: no grouped heads; `head_dim` is the rotary part
        sizes = sizes | {"num_key_value_heads": HEADS, "head_dim": SIZES["qk_rope_head_dim"]}
    token_ids = iter(range(VOCAB - 2, 8, -1))
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, value, default = field.name, _stored(config, field.name), _default_of(field)
        if isinstance(value, PreTrainedConfig):
            arguments[name] = shrink(value, parent=config.model_type, key=name)
        elif isinstance(value, bool) or not field.init:
            continue
        elif name.endswith(("token_id", "token_index")):
            if isinstance(value, int) and value >= VOCAB - 40:
                arguments[name] = next(token_ids)
            elif isinstance(value, (list, tuple)):
                arguments[name] = [next(token_ids) for _ in value]
        elif isinstance(value, (list, tuple)) and name in LISTS:
            arguments[name] = list(LISTS[name])
        elif default is None:
            if name in FREE_WHEN_DERIVED and not (name == "head_dim" and _stored(config, "kv_lora_rank")):
                arguments[name] = sizes[name]
        elif isinstance(value, int) and value > 0 and name in sizes:
            arguments[name] = sizes[name]
        elif value != default:
            arguments[name] = value
    if _stored(config, "depths") and _stored(config, "_out_indices"):
        arguments["out_indices"] = list(_stored(config, "_out_indices"))
    return arguments | _shrunk_layer_lists(config, sizes)


def _shrunk_layer_lists(config: PreTrainedConfig, sizes: dict[str, int]) -> dict[str, Any]:
    """The per-layer lists cut to representative layers, and the number of layers that this leaves."""
    lists = _layer_lists(config)
    if not lists:
        return {}
    layers = _representative_layers(lists)
    arguments: dict[str, Any] = {}
    for name, entries in lists.items():
        kept = [entries[i] for i in layers]
        arguments[name] = [sizes.get(name, e) if type(e) is int and e > 1 else e for e in kept]
    count_field = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if count_field in {field.name for field in dataclasses.fields(config)}:
        arguments[count_field] = len(layers)
    return arguments


def _repair_rope(config: PreTrainedConfig) -> None:
    """Give the lists inside rotary parameters the lengths that the small heads need."""
    rope = _stored(config, "rope_parameters")
    hidden, heads = _stored(config, "hidden_size"), _stored(config, "num_attention_heads")
    if not isinstance(rope, dict) or not hidden or not heads:
        return
    head_dim = _stored(config, "head_dim") or hidden // heads
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        half = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
        if parameters.get("mrope_section") and sum(parameters["mrope_section"]) != half:
            third = half // 3
            parameters["mrope_section"] = [half - 2 * third, third, third]
        for name in ("short_factor", "long_factor"):
            if parameters.get(name):
                parameters[name] = parameters[name][:1] * half


def shrink(config: PreTrainedConfig, *, parent: str = "", key: str = "") -> PreTrainedConfig:
    """A small configuration of the same class; ``key`` is its field in the ``parent`` model_type, if any."""
    overrides = OVERRIDES.get(config.model_type, {}) | OVERRIDES.get(f"{parent}.{key}", {})
    small = type(config)(**_shrunk_fields(config, key) | copy.deepcopy(overrides))
    _repair_rope(small)
    return small


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """No log lines, progress bars or warnings from transformers inside; its settings are restored after."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def model_class(specimen: Specimen) -> type[PreTrainedModel]:
    """The class of a specimen, imported now."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    if hasattr(transformers, specimen.class_name):
        return getattr(transformers, specimen.class_name)
    package = f"transformers.models.{model_type_to_module_name(specimen.model_type)}"
    module = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    return getattr(module, specimen.class_name)


def tiny_config(specimen: Specimen) -> PreTrainedConfig:
    """The small configuration to build a specimen from; raises `CannotShrink` where there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with silenced():
        try:
            config_class = CONFIG_MAPPING[specimen.model_type]
            config = shrink(config_class(**copy.deepcopy(DEFAULTS.get(specimen.model_type, {}))))
            wanted = model_class(specimen).config_class
            if isinstance(config, wanted):
                return config
            # a class for one part of a composite model, such as the language model of a vision-language one
            return next((part for part in vars(config).values() if isinstance(part, wanted)), config)
        except Exception as error:
            raise CannotShrink(f"{specimen.name}: {type(error).__name__}: {error}") from error


# --------------------------------------------------------------------------------------------------- models


def build(
    specimen: Specimen, *, dtype: torch.dtype = torch.float32, seed: int = 0, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """A CPU model whose stored tensors hold distinct random values, fixed by the seed and the tensors' names.

    In 16-bit types distinct values may round to the same one.
    Raises `CannotShrink` for what `NOT_BUILT` lists and for models above ``MAX_PARAMETERS``.
    """
    config = tiny_config(specimen) if config is None else config
    outline = meta_model(specimen, dtype=dtype, config=config)
    size = sum(parameter.numel() for parameter in outline.parameters())
    if size > MAX_PARAMETERS:
        raise CannotShrink(f"{specimen.name}: {size:,} parameters")
    with silenced():
        model = model_class(specimen)._from_config(config, dtype=dtype)
    fill(model, seed=seed)
    return model.eval()


def meta_model(
    specimen: Specimen, *, dtype: torch.dtype = torch.float32, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """The same model without storage, on the meta device."""
    config = tiny_config(specimen) if config is None else config
    with silenced(), torch.device("meta"):
        try:
            return model_class(specimen)._from_config(config, dtype=dtype)
        except Exception as error:
            raise CannotShrink(f"{specimen.name}: {type(error).__name__}: {error}") from error


# Integer buffers of indices, and what they index: token -> expert tables.
INDEX_TABLES = {"tid2eid": EXPERTS}


@torch.no_grad()
def fill(model: PreTrainedModel, *, seed: int = 0) -> None:
    """Random values into all that a checkpoint of the model stores; tied tensors are filled once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        tensor.copy_(_random_like(name, tensor, generator))


def _random_like(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        # Evenly spaced in (-0.2, 0.2), in random order: no two values of a tensor are equal in float32.
        offset = torch.rand((), generator=generator, dtype=torch.float64)
        order = torch.randperm(tensor.numel(), generator=generator).reshape(tensor.shape)
        noise = (order + offset) / max(tensor.numel(), 1) * 0.4 - 0.2
        return noise + 1.0 if tensor.ndim == 1 and name.endswith("weight") else noise
    if not tensor.ndim:  # a counter
        return torch.randint(1, 2**31, (), generator=generator)
    table_size = INDEX_TABLES.get(name.rpartition(".")[2])
    if table_size is not None or not tensor.any():
        return torch.randint(0, table_size or 2, tensor.shape, generator=generator)
    # Sizes or offsets: between half of what the model itself put there and all of it, which stays valid.
    fraction = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) / 2 + 0.5
    return (tensor * fraction).ceil()


def sample_inputs(model: PreTrainedModel, *, batch: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    """Inputs of a causal language model with which ``model(**inputs)`` runs."""
    generator = torch.Generator().manual_seed(0)
    rows = batch
    if model.config.model_type.startswith("musicgen"):  # one row for each codebook of each sample
        rows = batch * model.config.num_codebooks
    ids = torch.randint(3, VOCAB // 2, (rows, length), generator=generator)  # below all special tokens
    return {"input_ids": ids, "attention_mask": torch.ones(batch, length, dtype=torch.long)}


# ------------------------------------------------------------------------------------------------ checkpoints


def save_original(
    model: PreTrainedModel, directory: str | Path, *, max_shard_size: str = "100KB", prefixes: bool = False
) -> None:
    """A checkpoint as on the hub: names and layout before conversion, several files with an index.

    A model that was not loaded from a checkpoint is saved without the prefixes that loading removes
    (``PrefixChange``, such as ``language_model.`` of Qwen3.5). ``prefixes`` puts them back, as on the hub.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    fresh = "_weight_conversions" not in vars(model)
    if prefixes and fresh:
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    with silenced():
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    if prefixes and fresh:
        del model._weight_conversions


def save_internal(model: PreTrainedModel, directory: str | Path, *, files: int = 2) -> None:
    """A checkpoint under the model's own names, tied tensors once, in ``files`` files with an index."""
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with silenced():
        model.config.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().clone().contiguous()
    names = sorted(tensors)
    per_file = math.ceil(len(names) / files)
    weight_map: dict[str, str] = {}
    for number in range(files):
        part = names[number * per_file : (number + 1) * per_file]
        filename = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / filename, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, filename)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


# --------------------------------------------------------------------------------------------------- the zoo


def causal_lm_specimens() -> list[Specimen]:
    """Every causal language model of the installed transformers, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    specimens = []
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        class_names = [class_name] if isinstance(class_name, str) else list(class_name)
        specimens.append(Specimen(model_type, model_type, class_names[0], "causal-lm"))
    return sorted(specimens, key=lambda specimen: specimen.name)


# A dozen specimens that differ in what makes loading hard, for tests that cannot afford all.
REPRESENTATIVE = (
    "apertus",  # tensors without dimensions
    "bailing_hybrid",  # Concatenate(0), merged experts, linear and full attention
    "deepseek_v4",  # an integer buffer, merged experts under other names
    "gpt2",  # transposed linears, tied head, layers not called `layers`
    "hrm_text",  # Chunk(0), two stacks of layers
    "inkling_mm_model:InklingForConditionalGeneration",  # Interleave on both dimensions, then Chunk
    "kimi_linear",  # Concatenate(0), dense and sparse layers
    "llama",  # grouped heads, no conversion
    "olmo_hybrid",  # Concatenate(0) of unequal sizes
    "qwen3_5_moe_text",  # a removed prefix, merged experts
    "step3p7:Step3p7ForConditionalGeneration",  # Chunk, then PermuteForRope; Concatenate(1)
    "zamba2",  # one block tied into several layers
)


def representative_specimens() -> list[Specimen]:
    """Those of `REPRESENTATIVE` that the installed transformers has."""
    return [s for s in causal_lm_specimens() + converter_specimens() if s.name in REPRESENTATIVE]


# Where to look for the class of a model_type, best first: what people load, then the bare model.
_TASKS = """
    IMAGE_TEXT_TO_TEXT MULTIMODAL_LM SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ TEXT_TO_WAVEFORM MASKED_LM
    OBJECT_DETECTION UNIVERSAL_SEGMENTATION SEMANTIC_SEGMENTATION VIDEO_CLASSIFICATION IMAGE_CLASSIFICATION
    TIME_SERIES_PREDICTION PRETRAINING DECISION
"""
HEAD_MAPPINGS = [*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS.split()), "MODEL_MAPPING_NAMES"]
# Classes that the automatic mappings name for a model_type, but that do not load its checkpoints.
MISLEADING_HEADS = {
    ("shieldgemma2", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("shieldgemma2", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"),
}
FAMILY_OF_MAPPING = {
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "vision-language",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "encoder",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES": "encoder",
    "MODEL_FOR_IMAGE_MAPPING_NAMES": "encoder",
}


def _class_names(mapping: dict[str, Any], model_type: str) -> list[str]:
    names = mapping.get(model_type, [])
    return [names] if isinstance(names, str) else list(names)


def registry_keys() -> list[str]:
    """The keys (model types and class names) of transformers' registry of weight conversions."""
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("")  # builds the cache
    return sorted(conversion_mapping._checkpoint_conversion_mapping_cache)


def _specimen_of_key(key: str, mappings: dict[str, dict[str, Any]]) -> Specimen | None:
    """The model in which a registry key is met first: a head class of a model_type, or the class itself."""
    import transformers

    for name in HEAD_MAPPINGS:
        if (key, name) in MISLEADING_HEADS:
            continue
        for class_name in _class_names(mappings.get(name, {}), key)[:1]:
            return Specimen(f"{key}:{class_name}", key, class_name, _family(mappings, key, class_name))
    for mapping in reversed(mappings.values()):
        for model_type in mapping:
            if key in _class_names(mapping, model_type):
                return Specimen(f"{model_type}:{key}", model_type, key, _family(mappings, model_type, key))
    config_class = getattr(getattr(transformers, key, None), "config_class", None)
    if config_class is None:
        return None  # no class of its own: part of another model
    return Specimen(f"{config_class.model_type}:{key}", config_class.model_type, key, "other")


def _family(mappings: dict[str, dict[str, Any]], model_type: str, class_name: str) -> str:
    for name, family in FAMILY_OF_MAPPING.items():
        if class_name in _class_names(mappings.get(name, {}), model_type):
            return family
    return "other"


def converter_specimens() -> list[Specimen]:
    """A model for each key of the conversion registry that names no causal language model, by name.

    Keys of parts without a class of their own in the automatic mappings are met in the model that holds them.
    """
    from transformers.models.auto import modeling_auto

    mappings = {
        name: mapping
        for name, mapping in vars(modeling_auto).items()
        if name.endswith("_MAPPING_NAMES") and name.startswith("MODEL_")
    }
    causal = {specimen.model_type: specimen.class_name for specimen in causal_lm_specimens()}
    specimens: set[Specimen] = set()
    with silenced():
        for key in registry_keys():
            specimen = _specimen_of_key(key, mappings)
            if specimen is None or causal.get(specimen.model_type) == specimen.class_name:
                continue
            if key not in causal or specimen.family == "vision-language":
                specimens.add(specimen)
    return sorted(specimens, key=lambda specimen: specimen.name)
