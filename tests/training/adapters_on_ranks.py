"""Trainings of many LoRAs on ranks; sent to processes by name."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from tests.support.world import attempt
from tests.training import tiny
from tests.training.on_ranks import COMMON, words

from shardwise.cli.train import run_on_rank
from shardwise.fsdp.torch_private import get_given_timeout
from shardwise.training import train_adapters, trl_objects
from shardwise.training.adapters_config import read_adapters
from shardwise.training.run_config import read_run_config
from shardwise.training.run_inputs import lock_output
from shardwise.training.run_outcome import TrlOutcome


def prepare(folder: Path) -> Path:
    tiny.write_model(folder / "model")
    for name, count in (("ada", 24), ("bob", 10)):
        tiny.write_chats(folder / f"{name}.jsonl", count)
    tiny.write_rows(folder / "eve.jsonl", *[tiny.pair(n) for n in range(20)])
    plain = [{"prompt": f"{n} and", "chosen": f" {n + 1}" * (1 + n % 4), "rejected": " no"} for n in range(12)]
    tiny.write_rows(folder / "fay.jsonl", *plain)
    return folder


def values(folder: Path, output: str, ranks: int) -> dict[str, Any]:
    """Two adapters with other data, ranks, steps, optimizers and schedules; steps of 4 and 8 rows on all ranks."""
    return {
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / output),
        "per_device_train_batch_size": 4 // ranks,
        "tokens_per_pass": 512,
        "save_strategy": "steps",
        "save_steps": 2,
        "lora_dropout": 0.0,
        "gradient_checkpointing": False,
        "adapters": {
            "ada": {
                "dataset_name": str(folder / "ada.jsonl"),
                "max_steps": 8,
                "test_split_size": 0.2,
                "eval_strategy": "steps",
                "eval_steps": 3,
            },
            "bob": {
                "dataset_name": str(folder / "bob.jsonl"),
                "num_train_epochs": 3,
                "gradient_accumulation_steps": 2,
                "lora_r": 4,
                "lora_target_modules": ["q_proj", "v_proj"],
                "optim": "sgd",
                "learning_rate": 0.1,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
                "assistant_only_loss": True,
                "max_grad_norm": 0.5,
                "seed": 3,
            },
        },
    }


def with_pairs(folder: Path, output: str, ranks: int) -> dict[str, Any]:
    """Also two adapters on pairs: chats, and plain text of which rows are cut; 4 and 8 pairs in a step."""
    given = values(folder, output, ranks)
    eve = {
        "loss": "dpo",
        "beta": 0.3,
        "dataset_name": str(folder / "eve.jsonl"),
        "max_steps": 6,
        "max_length": 48,
        "test_split_size": 0.2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "lora_dropout": 0.5,
    }
    fay = {
        "loss": "dpo",
        "dataset_name": str(folder / "fay.jsonl"),
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 16,
        "lora_r": 4,
        "lora_target_modules": ["q_proj", "v_proj"],
        "optim": "sgd",
        "learning_rate": 0.1,
        "seed": 5,
    }
    given["adapters"] = {"ada": {**given["adapters"]["ada"], "max_steps": 4}, "eve": eve, "fay": fay}
    return given


def config(given: dict[str, Any]) -> list[str]:
    return words({**COMMON, "max_steps": None, **given})


def train(given: dict[str, Any]) -> TrlOutcome:
    """Train on this rank."""
    return run_on_rank(read_run_config(config(given)))


def lock_another_folder(folder: str) -> tuple[str, str]:
    """Each rank has a disk of its own under the path of the output folder."""

    def lock() -> None:
        with lock_output(Path(folder) / str(dist.get_rank()), {"method": "sft"}, []):
            pass

    return attempt(lock)


def train_with_timeout(given: dict[str, Any]) -> TrlOutcome:
    """Train on this rank with ``ddp_timeout``, which holds for meetings and a process group of the base's mesh."""
    load_base, groups = trl_objects.load_base, []

    def load_with_group(*positional: Any) -> Any:
        groups.append(dist.new_group())
        return load_base(*positional)

    with (
        mock.patch.object(trl_objects, "load_base", load_with_group),
        mock.patch.object(train_adapters, "SharedBank", wraps=train_adapters.SharedBank) as shared_bank,
    ):
        outcome = train({**given, "ddp_timeout": 900})
    assert get_given_timeout(groups[0]) == 900
    assert shared_bank.call_args.args[0].timeouts.meeting_timeout_s == 900
    return outcome


def train_alone(given: dict[str, Any], name: str) -> list[float]:
    """Train one of the adapters by TRL's trainer on this rank; the losses of all steps."""
    return [entry["loss"] for entry in history_alone(given, name) if "loss" in entry]


def history_alone(given: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """As ``train_alone``; all that is logged."""
    own = read_adapters(read_run_config(config(given)))[name]
    return [dict(entry) for entry in run_on_rank(own).history]


def train_until(given: dict[str, Any], passes: int, number: int = signal.SIGTERM) -> TrlOutcome:
    """Train on this rank, and have the last one sent a signal after some passes."""
    from shardwise.bank.adapter_bank import AdapterBank
    from shardwise.ranks.world import World

    original, done = AdapterBank.forward_backward, 0

    def counted(self: AdapterBank, batches: Any) -> Any:
        nonlocal done
        done += 1
        if done == passes and World.current().rank == World.current().size - 1:
            os.kill(os.getpid(), number)
        return original(self, batches)

    AdapterBank.forward_backward = counted  # type: ignore[method-assign]
    return train(given)
