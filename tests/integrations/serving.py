"""Functions that ranks run in tests of vLLM."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import load_file

import shardwise
from shardwise.integrations.vllm import load_into, weight_source
from shardwise.options import MergedAdapter


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(ABC):
    """vLLM's, as of 0.33."""

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


@contextmanager
def vllm() -> Iterator[None]:
    """Its interface for weight updates, without the rest of it."""
    modules = {}
    path = "vllm.distributed.weight_transfer.base"
    for count in range(1, 5):
        name = ".".join(path.split(".")[:count])
        modules[name] = ModuleType(name)
        modules[name].__path__ = []  # type: ignore[attr-defined]
    modules[path].WeightSource, modules[path].ParamMeta = Source, ParamMeta  # type: ignore[attr-defined]
    with patch.dict(sys.modules, modules):
        yield


def compare(folder: str, lora_rank: int) -> list[str]:
    """What an engine would get that is not as in the files; with a LoRA whose matrices are zero merged in."""
    wanted = {key: value for file in Path(folder).glob("*.safetensors") for key, value in load_file(file).items()}
    lora = LoraConfig(r=lora_rank, target_modules=["q_proj", "down_proj"]) if lora_rank else None
    tuning = shardwise.Full() if lora is None else shardwise.Lora(lora)
    model = shardwise.from_pretrained(folder, dtype=torch.float32, tuning=tuning)
    only = MergedAdapter() if lora_rank else None
    faults: list[str] = []

    def look(pairs: Iterable[tuple[str, torch.Tensor]], told: str) -> None:
        found = dict(pairs)
        if found.keys() != wanted.keys():
            faults.append(f"{told}: {sorted(found.keys() ^ wanted.keys())}")
        faults.extend(f"{told}: {key}" for key in wanted if not torch.equal(found[key], wanted[key]))

    with vllm():
        source = weight_source(model, only=only)
        assert isinstance(source, Source)
        metadata = source.metadata
        expected = [(key, wanted[key].dtype, tuple(wanted[key].shape)) for key in wanted]
        if sorted((one.name, one.dtype, one.shape) for one in metadata) != sorted(expected):
            faults.append("metadata")
        for turn in range(2):
            pairs = list(source.iter_full())
            look(pairs, f"pass {turn}")
            if [name for name, _ in pairs] != [one.name for one in metadata]:
                faults.append("another order than that of metadata")
    if load_into(lambda pairs: look(pairs, "load_into"), model, only=only) != len(wanted):
        faults.append("load_into: counted otherwise")
    return faults


def refuse(folder: str, where: str) -> str:
    """The error where an engine does not take all: on one rank, on all; or fails on one."""
    model = shardwise.from_pretrained(folder, dtype=torch.float32)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def load_weights(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for number, (_key, _) in enumerate(pairs):
            if number == 2 and (where == "everywhere" or (rank == 1 and where == "on one")):
                return
            if number == 2 and rank == 1 and where == "raises":
                raise KeyError("no such parameter")

    try:
        load_into(load_weights, model)
    except (shardwise.ShardwiseError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
