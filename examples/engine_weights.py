"""A LoRA that is trained, merged and passed to an inference engine in the same process.

    torchrun --nproc-per-node 2 examples/engine_weights.py --output trained/engine

The engine here is a transformers model with the method ``load_weights`` of vLLM's models. With vLLM, pass its own,
or use its weight updates with ``weight_source(model, only=MergedAdapter())``. See docs/vllm.md.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from small_model import CHATS, train_tokenizer, write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise
from shardwise.integrations.vllm import load_into
from shardwise.options import MergedAdapter


class Engine:
    """An inference engine, whole on every rank."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in pairs:
                parameters[name].copy_(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("trained/engine"))
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group()

    start = options.output / "start"
    if dist.get_rank() == 0 and not start.is_dir():
        write_model(start, train_tokenizer(CHATS, 600), seed=0)
    dist.barrier()

    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = shardwise.from_pretrained(start, dtype=torch.float32, tuning=shardwise.Lora(lora))
    tokenizer, engine = AutoTokenizer.from_pretrained(start), Engine(start)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    rows = [json.loads(line)["messages"] for line in CHATS.read_text("utf-8").splitlines()]
    rows = rows[dist.get_rank() :: dist.get_world_size()]
    question = tokenizer("Where", return_tensors="pt").input_ids
    for step in range(options.steps):
        texts = tokenizer.apply_chat_template(rows[4 * step : 4 * step + 4], tokenize=False)
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = load_into(engine.load_weights, model, only=MergedAdapter())
    with torch.no_grad():
        difference = (engine.model(question).logits - model(question).logits).abs().max()
    assert tensors == len(list(engine.model.parameters())), "all tensors of the engine"
    assert difference < 1e-4, "the engine computes the same logits"

    shardwise.save_adapter(model, options.output / "adapter")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
