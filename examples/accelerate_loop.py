"""An ordinary accelerate loop on a model that shardwise has loaded in shards.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 examples/accelerate_loop.py

With your checkpoint: ``... accelerate_loop.py --model Qwen/Qwen3-0.6B``. Otherwise a small model is created.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM, get_linear_schedule_with_warmup

import shardwise

BATCH_SIZE, LENGTH = 4, 32


def small_model(folder: Path) -> None:
    """Write a checkpoint of random weights."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)


def train(checkpoint: str, output: Path, steps: int) -> list[float]:
    """Train a few steps, save a state and load it again, and save the model. Return the losses."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=2)
    model = shardwise.from_pretrained(checkpoint, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 100)
    rows = torch.randint(0, 256, (steps * 2 * BATCH_SIZE * accelerator.num_processes, LENGTH))
    model, optimizer, schedule, data = accelerator.prepare(
        model, optimizer, schedule, DataLoader(rows, batch_size=BATCH_SIZE)
    )
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(float(accelerator.gather(loss.detach()).mean()))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and len(losses) == max(1, steps // 2):
            accelerator.save_state(str(output / "state"))
    accelerator.load_state(str(output / "state"))
    shardwise.save(accelerator.unwrap_model(model), output / "model")
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; saved to {output}")
    return losses


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", help="a folder or a name on the hub")
    arguments.add_argument("--output", type=Path, help="a folder that all ranks see")
    arguments.add_argument("--steps", type=int, default=6)
    options = arguments.parse_args()
    with shardwise.integrations.accelerate(), tempfile.TemporaryDirectory() as own:
        accelerator = Accelerator(cpu=not torch.accelerator.is_available())  # starts the process group
        shared = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)  # one folder for all ranks
        folder = Path(shared[0])
        if options.model is None and accelerator.is_main_process:
            small_model(folder / "checkpoint")
        accelerator.wait_for_everyone()
        train(options.model or str(folder / "checkpoint"), options.output or folder / "output", options.steps)
        accelerator.wait_for_everyone()
        accelerator.end_training()


if __name__ == "__main__":
    main()
