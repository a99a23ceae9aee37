"""Everything that saves, as small as it can be: what it writes for a seed, and what of it is found."""

import io
import json
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
from tests.models import reference
from tests.support.crashes import CrashState, model_in
from tests.support.meanwhile import MARK, unmark
from tests.torture import libraries

import shardwise
from shardwise import Checkpointer, Lora

OLD, NEW, OTHER, NEXT = 1, 2, 3, 4
"""Seeds: what was there, what the first actor saves, what another one does, and who comes after a crash."""

SEEDS = (OLD, NEW, OTHER, NEXT)
ONE_FILE, SEVERAL_FILES = "1GB", "3KB"
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None

Found = Hashable
"""What is found of a save, all that counts; None where there is none."""


Act = Callable[..., None]
"""Saves into a folder what a seed makes; by what has been put into another folder for that."""


def _nothing(_: Path) -> None:
    pass


@dataclass(frozen=True)
class Verb:
    """One way to save, what finds it again, and what puts down beforehand what it takes.

    ``is_of_others``: of a file, by its way there, whether the code of others writes it first, beside all writers.
    A process killed meanwhile leaves it behind.
    """

    act: Act
    look: Callable[[CrashState], Found]
    prepare: Callable[[Path], None] = _nothing
    is_of_others: Callable[[str], bool] = lambda name: False


@contextmanager
def put_down(state: CrashState) -> Iterator[Path]:
    """The files of a state, in a folder. Whose mark is there has died with the machine."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        state.put_into(folder)
        unmark(Path(folder))
        yield Path(folder)


def _contents(tensors: Mapping[str, torch.Tensor]) -> Found:
    return frozenset((name, tensor.detach().numpy().tobytes()) for name, tensor in tensors.items())


# Models


def saving(*sizes: str) -> Act:
    """Saves of every seed in turn with one of these sizes."""

    def act(folder: str, seed: int, _: Path | None = None) -> None:
        options = shardwise.options.SaveOptions(progress=False)
        shardwise.save(Blocks(seed), folder, max_shard_size=sizes[seed % len(sizes)], options=options)

    return act


# Adapters


def _put_adapters(inputs: Path) -> None:
    """A base and an adapter of every seed."""
    reference.save_tiny(inputs / "base")
    for seed in SEEDS:
        shardwise.save_adapter(_tuned(inputs / "base", seed, alpha=8), inputs / f"adapter-{seed}")


def _tuned(base: Path, seed: int, *, alpha: int) -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=alpha, init_lora_weights=False)
    return shardwise.from_pretrained(base, tuning=Lora(config), options=shardwise.options.LoadOptions(seed=seed))


def _saving_adapters(alphas: Mapping[int, int]) -> Act:
    def act(folder: str, seed: int, inputs: Path) -> None:
        model = _tuned(inputs / "base", seed, alpha=alphas[seed])
        shardwise.save_adapter(model, folder, options=shardwise.options.SaveOptions(progress=False))

    return act


def _adapter_in(state: CrashState) -> Found:
    """What PEFT reads."""
    weights = state.files.get("adapter_model.safetensors")
    if weights is None:
        return None
    return state.files["adapter_config.json"], _contents(load_safetensors(bytes(weights)))


_configs: dict[Found, bytes] = {}
"""Of adapters that were seen where nothing befell them, by their weights."""


def _adapter_or_what_is_aside_in(state: CrashState) -> Found:
    """No weights are found beside the config of others; for the moment of a commit they may be set aside."""
    aside = sorted(name for name in state.files if name.startswith("adapter_model.") and name.endswith(".older"))
    weights = state.files.get("adapter_model.safetensors")
    if weights is None:
        return _contents(load_safetensors(bytes(state.files[aside[0]]))) if aside else None
    found, config = _contents(load_safetensors(bytes(weights))), state.files["adapter_config.json"]
    if _configs.setdefault(found, config) != config:
        raise AssertionError("weights lie beside the config of others")
    return found


# Tenants of a bank


def _put_base(inputs: Path) -> None:
    reference.save_tiny(inputs / "base")


def _saving_tenants(alphas: Mapping[int, int]) -> Act:
    """After a step, in the middle of a window."""

    def act(folder: str, seed: int, inputs: Path) -> None:
        bank = shardwise.AdapterBank(shardwise.from_pretrained(inputs / "base"))
        config = LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=alphas[seed])
        bank.add_adapter("ada", config, seed=seed, gradient_accumulation_steps=2)
        for number in range(3):
            bank.forward_backward([("ada", {"input_ids": torch.tensor([[1, 2, 3 + seed]])})])
            if number == 1:
                bank.optim_step("ada", lr=0.1 * seed)
        bank.save("ada", folder, options=shardwise.options.SaveOptions(progress=False))

    return act


def _training_of(state: CrashState, weights: str) -> Found:
    """What an adapter's file has, and the training that it names."""
    content = bytes(state.files[weights])
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    training = bytes(state.files[header["__metadata__"]["shardwise.training"]])
    of_training = json.loads(training[8 : 8 + int.from_bytes(training[:8], "little")])
    told = of_training["__metadata__"]["shardwise.training"]
    return _contents(load_safetensors(content)), _contents(load_safetensors(training)), told


def _tenant_in(state: CrashState) -> Found:
    weights = "adapter_model.safetensors"
    return _training_of(state, weights) if weights in state.files else None


def _tenant_or_what_is_aside_in(state: CrashState) -> Found:
    if _adapter_or_what_is_aside_in(state) is None:
        return None
    aside = sorted(name for name in state.files if name.startswith("adapter_model.") and name.endswith(".older"))
    weights = "adapter_model.safetensors"
    return _training_of(state, weights if weights in state.files else aside[0])


def _merge(folder: str, seed: int, inputs: Path) -> None:
    shardwise.merge_adapter(inputs / "base", inputs / f"adapter-{seed}", folder, max_shard_size="20KB")


def _put_models(inputs: Path) -> None:
    for seed in SEEDS:
        shardwise.save(
            Blocks(seed), inputs / f"plain-{seed}", options=shardwise.options.SaveOptions(progress=False)
        )


def _merge_into_a_file(folder: str, seed: int, inputs: Path) -> None:
    shardwise.merge_weights(inputs / f"plain-{seed}", folder, file_format="bin")


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


def _checkpointing(mode: Any) -> Act:
    def act(folder: str, seed: int, _: Path) -> None:
        with Checkpointer(folder, keep=1, mode=mode) as checkpointer:
            checkpointer.save(seed, _trained(seed).state)

    return act


_restored: dict[Hashable, Found] = {}


def _checkpoint_in(state: CrashState) -> Found:
    """What a training is brought back to. Of what is not complete only the names are looked at, once."""
    complete = {name.removesuffix(".metadata") for name in state.files if name.endswith("/.metadata")}
    if not complete:
        return None
    told = frozenset(
        (name, content if any(name.startswith(folder) for folder in complete) else b"")
        for name, content in state.files.items()
        if name != MARK
    )
    if told not in _restored:
        _restored[told] = _restored_from(state)
    return _restored[told]


def _restored_from(state: CrashState) -> Found:
    training = Training(99)
    with put_down(state) as folder:
        checkpointer = Checkpointer(folder)
        step = checkpointer.latest()
        if step is None:
            return None
        checkpointer.restore(training.state)
    return step, _frozen(training.taken())


# accelerate's files


def _accelerate_model(form: Any) -> Act:
    def act(folder: str, seed: int, _: Path) -> None:
        shardwise.save_accelerate_model(Blocks(seed), folder, form)

    return act


def _accelerate_model_in(state: CrashState) -> Found:
    opened = {f"pytorch_model_fsdp_0{end}" for end in ("/.metadata", "_rank0.bin")}
    if not opened & state.files.keys():
        return None
    model = Blocks(99)
    with put_down(state) as folder:
        shardwise.load_accelerate_model(model, folder)
    return _contents(model.state_dict())


def _save_plain_optimizer(folder: str, seed: int, _: Path) -> None:
    """Of which no byte is a tensor's."""
    model = Blocks(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * seed)
    shardwise.save_accelerate_optimizer(model, optimizer, folder, "full")


# What other libraries save through us


def _trainer_in(state: CrashState) -> Found:
    if not any(name.endswith("/shardwise.trainer.json") for name in state.files):
        return None
    with put_down(state) as folder:
        return libraries.of_trainer_in(folder)


def _state_in(state: CrashState) -> Found:
    with put_down(state) as folder:
        return libraries.of_accelerate_in(folder)


VERBS: dict[str, Verb] = {
    "one file": Verb(saving(ONE_FILE), model_in),
    "several files": Verb(saving(SEVERAL_FILES), model_in),
    "several over one": Verb(saving(ONE_FILE, ONE_FILE, SEVERAL_FILES, SEVERAL_FILES), model_in),
    "one over several": Verb(saving(SEVERAL_FILES, SEVERAL_FILES, ONE_FILE, ONE_FILE), model_in),
    "adapter": Verb(_saving_adapters(dict.fromkeys(SEEDS, 8)), _adapter_in, _put_adapters),
    "adapter of another scaling": Verb(
        _saving_adapters({seed: 8 + seed for seed in SEEDS}), _adapter_or_what_is_aside_in, _put_adapters
    ),
    "tenant": Verb(_saving_tenants(dict.fromkeys(SEEDS, 8)), _tenant_in, _put_base),
    "tenant of another scaling": Verb(
        _saving_tenants({seed: 8 + seed for seed in SEEDS}), _tenant_or_what_is_aside_in, _put_base
    ),
    "merge": Verb(_merge, model_in, _put_adapters),
    "merge into a file": Verb(_merge_into_a_file, _torch_file("pytorch_model.bin"), _put_models),
    "checkpoint": Verb(_checkpointing("sync"), _checkpoint_in),
    "checkpoint beside": Verb(_checkpointing("async"), _checkpoint_in),
    "accelerate file": Verb(_accelerate_model("full"), _torch_file("pytorch_model_fsdp.bin")),
    "accelerate optimizer": Verb(_save_plain_optimizer, _torch_file("optimizer.bin")),
    "accelerate folder": Verb(_accelerate_model("sharded"), _accelerate_model_in),
    "accelerate files": Verb(_accelerate_model("local"), _accelerate_model_in),
    "accelerate state": Verb(libraries.save_by_accelerate, _state_in, is_of_others=libraries.is_of_accelerate),
}
if libraries.has_trainer():
    VERBS["trainer"] = Verb(libraries.save_by_trainer, _trainer_in, is_of_others=libraries.is_of_the_trainer)
"""All of them, by name."""

OF_TWO_SIZES = {
    "several, then one, over one": Verb(saving(ONE_FILE, ONE_FILE, SEVERAL_FILES, ONE_FILE), model_in),
    "one, then several, over several": Verb(
        saving(SEVERAL_FILES, SEVERAL_FILES, ONE_FILE, SEVERAL_FILES), model_in
    ),
}
"""Two at once that write differently. Of these one that was taken over sets the other's file aside for a moment."""
VERBS |= OF_TWO_SIZES
