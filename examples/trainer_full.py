"""Full fine-tuning by the Hugging Face Trainer, with a model in shards.

    torchrun --nproc-per-node 2 examples/trainer_full.py --output trained/full

A small model is created first. Started again with more --steps, the training resumes from the newest checkpoint, on
any number of ranks that divides 8. transformers loads the checkpoints and the final model in ``last``.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from small_model import CHATS, train_tokenizer, write_model
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import shardwise
from shardwise.integrations import ShardwiseTrainer, for_trainer


class FullTrainer(ShardwiseTrainer, Trainer):
    """The Trainer, with resumable checkpoints."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("trained/full"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group()

    start = options.output / "start"
    if dist.get_rank() == 0 and not start.is_dir():
        write_model(start, train_tokenizer(CHATS, 600), seed=0)
    dist.barrier()
    tokenizer = AutoTokenizer.from_pretrained(start)

    rows = []
    for line in CHATS.read_text("utf-8").splitlines():
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=False)
        rows.append({"input_ids": ids, "labels": ids})

    model = for_trainer(shardwise.from_pretrained(start, dtype=torch.float32))
    trainer = FullTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output / "run"),
            max_steps=options.steps,
            per_device_train_batch_size=8 // dist.get_world_size(),
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=5,
            save_steps=10,
            save_total_limit=2,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    has_checkpoint = any((options.output / "run").glob("checkpoint-*/shardwise.trainer.json"))
    dist.barrier()
    trainer.train(resume_from_checkpoint=has_checkpoint)
    trainer.save_model(str(options.output / "last"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
