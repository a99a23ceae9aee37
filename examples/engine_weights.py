"""A LoRA that is being trained, merged and handed to an inference engine in the same process.

    torchrun --nproc-per-node 2 examples/engine_weights.py --output trained/engine

The engine here is a model of transformers that takes tensors as models of vLLM do, by ``load_weights``. With vLLM
it is the engine's own; over its weight updates, ``weight_source(model, only=MergedAdapter())``. See docs/vllm.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise
from shardwise.integrations.vllm import adapter_faults, load_into
from shardwise.options import MergedAdapter
from shardwise.training.data.loader import step_loader
from shardwise.training.data.read_once import read_data
from shardwise.training.example import train_tokenizer, write_model
from shardwise.training.loop import train
from shardwise.training.options import Steps, TrainOptions


class Engine:
    """What answers: whole on every rank."""

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

    chats = Path(str(resources.files("shardwise.cli"))) / "data" / "facts.jsonl"
    start = options.output / "start"
    if dist.get_rank() == 0 and not start.is_dir():
        write_model(start, train_tokenizer(chats, 600), seed=0)
    dist.barrier()

    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = shardwise.from_pretrained(start, dtype=torch.float32, tuning=shardwise.Lora(lora))
    tokenizer, engine = AutoTokenizer.from_pretrained(start), Engine(start)
    asked = TrainOptions(learning_rate=5e-3, batch_size=4, duration=Steps(options.steps), log_every=1)
    steps = step_loader(read_data(chats, tokenizer, max_length=128), asked)

    question = tokenizer("Where", return_tensors="pt").input_ids
    train(model, steps, asked)
    tensors = load_into(engine.load_weights, model, only=MergedAdapter())
    with torch.no_grad():
        difference = (engine.model(question).logits - model(question).logits).abs().max()
    assert tensors == len(list(engine.model.parameters())), "each of the engine's has come"
    assert difference < 1e-4, "the engine answers as the model does"

    shardwise.save_adapter(model, options.output / "adapter")
    assert not adapter_faults(options.output / "adapter"), "vLLM would serve it"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
