"""Everything that saves, as small as it can be: what it writes for a seed, and what of it is found."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load as load_safetensors
from tests.checkpoints.tiny import Training
from tests.faults.saving import Blocks
from tests.tuning import reference

import shardwise
from shardwise import Asynchronous, Checkpointer, KeepLast, Lora, Synchronous
from shardwise.formats import open_checkpoint
from shardwise.testing.crashes import CrashState

OLD, NEW, OTHER, NEXT = 1, 2, 3, 4
"""Seeds: what was there, what the first actor saves, what another one does, and who comes after a crash."""

SEEDS = (OLD, NEW, OTHER, NEXT)
ONE_FILE, SEVERAL_FILES = "1GB", "3KB"
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None

Found = Hashable
"""What is found of a save, all that counts; None where there is none."""


@dataclass(frozen=True)
class Verb:
    """One way to save: ``act(folder, seed)`` saves what the seed makes; ``look`` finds it again."""

    act: Callable[[str, int], None]
    look: Callable[[CrashState], Found]


@contextmanager
def put_down(state: CrashState) -> Iterator[Path]:
    """The files of a state, in a folder."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        state.put_into(folder)
        yield Path(folder)


def _contents(tensors: Mapping[str, torch.Tensor]) -> Found:
    return frozenset((name, tensor.detach().numpy().tobytes()) for name, tensor in tensors.items())


# Models


def _saving(sizes: Mapping[int, str]) -> Callable[[str, int], None]:
    def act(folder: str, seed: int) -> None:
        options = shardwise.SaveOptions(progress=False)
        shardwise.save(Blocks(seed), folder, max_shard_size=sizes[seed], options=options)

    return act


def _model_in(state: CrashState) -> Found:
    """Every tensor, as whoever opens the folder finds it."""
    if not {"model.safetensors", "model.safetensors.index.json"} & state.files.keys():
        return None
    with state.reader() as reader:
        index = open_checkpoint(reader)
        return frozenset(
            (key, reader.read(entry.file, entry.start, entry.stop)) for key, entry in index.entries.items()
        )


def _sizes(old: str, new: str) -> dict[int, str]:
    return {OLD: old, NEW: new, OTHER: new, NEXT: old}


# Adapters


@cache
def _inputs() -> Path:
    """A base and an adapter of every seed, made once in every process that needs them."""
    folder = Path(tempfile.mkdtemp(dir=IN_MEMORY, prefix="shardwise-torture-"))
    reference.save_tiny(folder / "base")
    for seed in SEEDS:
        shardwise.save_adapter(_tuned(folder / "base", seed, alpha=8), folder / f"adapter-{seed}")
    return folder


def _tuned(base: Path, seed: int, *, alpha: int) -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=alpha, init_lora_weights=False)
    return shardwise.from_pretrained(base, tuning=Lora(config), options=shardwise.LoadOptions(seed=seed))


@cache
def _tuned_once(seed: int, alpha: int) -> Any:
    return _tuned(_inputs() / "base", seed, alpha=alpha)


def _save_adapter(folder: str, seed: int) -> None:
    shardwise.save_adapter(_tuned_once(seed, 8), folder, options=shardwise.SaveOptions(progress=False))


def _save_adapter_of_another_scaling(folder: str, seed: int) -> None:
    shardwise.save_adapter(_tuned_once(seed, 8 + seed), folder, options=shardwise.SaveOptions(progress=False))


def _adapter_in(state: CrashState) -> Found:
    """What PEFT reads."""
    weights = state.files.get("adapter_model.safetensors")
    if weights is None:
        return None
    return state.files["adapter_config.json"], _contents(load_safetensors(bytes(weights)))


def _merge(folder: str, seed: int) -> None:
    shardwise.merge_adapter(_inputs() / "base", _inputs() / f"adapter-{seed}", folder, max_shard_size="20KB")


def _merge_into_a_file(folder: str, seed: int) -> None:
    source = _inputs() / f"plain-{seed}"
    if not source.exists():
        shardwise.save(Blocks(seed), source, options=shardwise.SaveOptions(progress=False))
    shardwise.merge_weights(source, folder, file_format=shardwise.TorchFile())


def _torch_file(name: str) -> Callable[[CrashState], Found]:
    def look(state: CrashState) -> Found:
        content = state.files.get(name)
        if content is None:
            return None
        return _frozen(torch.load(io.BytesIO(content), weights_only=True))

    return look


def _frozen(value: Any) -> Found:
    if isinstance(value, dict):
        return frozenset((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.detach().numpy().tobytes()
    return value


# Checkpoints


@cache
def _trained(seed: int) -> Training:
    training = Training(seed)
    training.step()
    return training


def _checkpointing(mode: Any) -> Callable[[str, int], None]:
    def act(folder: str, seed: int) -> None:
        with Checkpointer(folder, keep=KeepLast(1), mode=mode) as checkpointer:
            checkpointer.save(seed, _trained(seed).state)

    return act


def _checkpoint_in(state: CrashState) -> Found:
    """What a training is brought back to."""
    if not any(name.startswith("step-") and name.endswith("/.metadata") for name in state.files):
        return None
    training = Training(99)
    with put_down(state) as folder:
        checkpointer = Checkpointer(folder)
        step = checkpointer.latest()
        if step is None:
            return None
        checkpointer.restore(training.state)
    return step, _frozen(training.taken())


# accelerate's files


def _accelerate_model(form: Any) -> Callable[[str, int], None]:
    def act(folder: str, seed: int) -> None:
        shardwise.save_accelerate_model(Blocks(seed), folder, form)

    return act


def _accelerate_model_in(state: CrashState) -> Found:
    model = Blocks(99)
    with put_down(state) as folder:
        if not any(folder.iterdir()):
            return None
        shardwise.load_accelerate_model(model, folder)
    return _contents(model.state_dict())


def _save_plain_optimizer(folder: str, seed: int) -> None:
    """Of which no byte is a tensor's."""
    model = Blocks(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * seed)
    shardwise.save_accelerate_optimizer(model, optimizer, folder, shardwise.OneFile())


VERBS: dict[str, Verb] = {
    "one file": Verb(_saving(_sizes(ONE_FILE, ONE_FILE)), _model_in),
    "several files": Verb(_saving(_sizes(SEVERAL_FILES, SEVERAL_FILES)), _model_in),
    "several over one": Verb(_saving(_sizes(ONE_FILE, SEVERAL_FILES)), _model_in),
    "one over several": Verb(_saving(_sizes(SEVERAL_FILES, ONE_FILE)), _model_in),
    "adapter": Verb(_save_adapter, _adapter_in),
    "adapter of another scaling": Verb(_save_adapter_of_another_scaling, _adapter_in),
    "merge": Verb(_merge, _model_in),
    "merge into a file": Verb(_merge_into_a_file, _torch_file("pytorch_model.bin")),
    "checkpoint": Verb(_checkpointing(Synchronous()), _checkpoint_in),
    "checkpoint beside": Verb(_checkpointing(Asynchronous()), _checkpoint_in),
    "accelerate file": Verb(_accelerate_model(shardwise.OneFile()), _torch_file("pytorch_model_fsdp.bin")),
    "accelerate optimizer": Verb(_save_plain_optimizer, _torch_file("optimizer.bin")),
    "accelerate folder": Verb(_accelerate_model(shardwise.DistributedFolder()), _accelerate_model_in),
    "accelerate files": Verb(_accelerate_model(shardwise.RankFiles()), _accelerate_model_in),
}
"""All of them, by name."""
