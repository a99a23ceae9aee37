"""A LoRA by TRL's SFTTrainer on a sharded model. The adapter is saved in PEFT's format.

    torchrun --nproc-per-node 2 examples/trl_sft_lora.py --output trained/sft

A small model is created first.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from small_model import CHATS, train_tokenizer, write_model
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import shardwise
from shardwise.integrations import ShardwiseTrainer, for_trainer


class LoraTrainer(ShardwiseTrainer, SFTTrainer):
    """SFTTrainer, with resumable checkpoints."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("trained/sft"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group()

    start = options.output / "start"
    if dist.get_rank() == 0 and not start.is_dir():
        write_model(start, train_tokenizer(CHATS, 600), seed=0)
    dist.barrier()

    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = shardwise.from_pretrained(start, dtype=torch.float32, tuning=shardwise.Lora(lora))
    trainer = LoraTrainer(
        model=for_trainer(model),
        args=SFTConfig(
            output_dir=str(options.output / "run"),
            max_steps=options.steps,
            per_device_train_batch_size=8 // dist.get_world_size(),
            learning_rate=5e-3,
            max_length=128,
            assistant_only_loss=True,
            logging_steps=5,
            save_steps=10,
            bf16=torch.cuda.is_available(),
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_list([json.loads(line) for line in CHATS.read_text("utf-8").splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(start),
    )
    trainer.train()
    trainer.save_model(str(options.output / "adapter"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
