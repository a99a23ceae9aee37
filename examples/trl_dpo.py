"""DPO by TRL on a sharded model: a LoRA, whose reference is the base, or a full training with a reference model.

    torchrun --nproc-per-node 2 examples/trl_dpo.py --output trained/dpo
    torchrun --nproc-per-node 2 examples/trl_dpo.py --output trained/dpo-full --full

A small model is created first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from small_model import CHATS, train_tokenizer, write_model
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import shardwise
from shardwise.integrations import ShardwiseTrainer, for_trainer


class PreferenceTrainer(ShardwiseTrainer, DPOTrainer):
    """DPOTrainer, with resumable checkpoints."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("trained/dpo"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    dist.init_process_group()

    start = options.output / "start"
    if dist.get_rank() == 0 and not start.is_dir():
        write_model(start, train_tokenizer(CHATS, 600), seed=0)
    dist.barrier()

    # Each answer is preferred to itself with the words in reverse order.
    pairs = []
    for line in CHATS.read_text("utf-8").splitlines():
        *prompt, answer = json.loads(line)["messages"]
        worse = {**answer, "content": " ".join(reversed(answer["content"].split()))}
        pairs.append({"prompt": prompt, "chosen": [answer], "rejected": [worse]})

    tuning: Any = shardwise.Full()
    if not options.full:
        tuning = shardwise.Lora(LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = shardwise.from_pretrained(start, dtype=torch.float32, tuning=tuning)
    reference = for_trainer(shardwise.from_pretrained(start, dtype=torch.float32)) if options.full else None
    trainer = PreferenceTrainer(
        model=for_trainer(model),
        ref_model=reference,
        args=DPOConfig(
            output_dir=str(options.output / "run"),
            max_steps=options.steps,
            per_device_train_batch_size=4 // dist.get_world_size(),
            learning_rate=1e-3,
            logging_steps=5,
            save_steps=10,
            bf16=torch.cuda.is_available(),
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(start),
    )
    trainer.train()
    trainer.save_model(str(options.output / "last"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
