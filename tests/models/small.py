"""Small transformers on meta."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def qwen3(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**sizes | heads | changes))
