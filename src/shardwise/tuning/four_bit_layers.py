"""PEFT's layers of LoRA on weights in four bits, which are merged as PEFT merges those on bitsandbytes' layers.

PEFT takes the numbers of a weight from bitsandbytes, or adds to the weight itself; bytes and scales of ours are
neither. On a stack of experts PEFT computes with the sum of both; ours adds the products. Imported when there is
such a layer: PEFT is slow to import.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import ParamWrapper
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.models.four_bit_base import pack_again
from shardwise.models.four_bit_experts import StackDelta, are_experts_in_four_bits, with_deltas
from shardwise.tuning import peft_compat

_INSTEAD = "iter_hf_tensors(model, only=MergedAdapter()) gives the merged weights"


class MergesInFourBits:
    """What such a layer does otherwise than PEFT's: numbers are made of bytes, added to, and packed again."""

    lora_A: Any
    lora_B: Any
    lora_bias: dict[str, bool]
    lora_variant: dict[str, Any]
    merged: bool
    merged_adapters: list[str]
    get_base_layer: Any
    get_delta_weight: Any

    def merge(
        self,
        safe_merge: bool = False,  # noqa: ARG002, FBT001, FBT002 - as PEFT has it; what is not finite is refused anyway
        adapter_names: list[str] | None = None,
    ) -> None:
        """Merge adapters into the bytes of this layer, which changes the numbers that they stand for.

        Raises:
            ConfigError: the layer is sharded; an adapter is more than a product of two matrices; or a sum is not
                finite. That adapter is not merged then.
        """
        names = [name for name in peft_compat.to_merge(self, adapter_names) if name in self.lora_A]
        for name in names:
            self._require_plain(name)
        for name in names:
            self._add(name, 1.0)
            self.merged_adapters.append(name)

    def resolve_lora_variant(self, **settings: Any) -> Any:
        """The variant that a config asks for, as PEFT has it: none.

        Raises:
            ConfigError: there is one.
        """
        found = super().resolve_lora_variant(**settings)  # type: ignore[misc]
        if found is not None:
            raise ConfigError(
                f"{type(found).__name__} needs the numbers of a weight that is in four bits; leave out use_dora "
                "and its kin, or quantization"
            )
        return None

    def unmerge(self) -> None:
        """Take merged adapters off again, but for what packing has rounded."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.lora_A:
                self._add(name, -1.0)

    def _add(self, name: str, sign: float) -> None:
        layer = self.get_base_layer()
        with torch.no_grad():
            numbers = layer.numbers().float() + sign * self.get_delta_weight(name).float()
            pack_again(layer, numbers.to(layer.packing.dtype))

    def _require_plain(self, name: str) -> None:
        layer = self.get_base_layer()
        tensors = (layer.weight, layer.weight_scales, self.lora_A[name].weight, self.lora_B[name].weight)
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            raise ConfigError(f"a layer in four bits that is sharded is not merged into in its place; {_INSTEAD}")
        if self.lora_bias.get(name) or name in self.lora_variant:
            raise ConfigError(
                f"adapter {name!r} is more than a product of two matrices (a bias of LoRA's, or a variant), and is "
                "not merged into a layer in four bits; unload() gives the base without it"
            )


class LinearOnFourBits(MergesInFourBits, lora.Linear):
    """Where bitsandbytes is not installed."""


class StackOnFourBits(ParamWrapper):
    """A LoRA on a stack of experts: its product is added to that of the weight, which stays bytes."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        deltas = [self._delta(name) for name in active_adapters if name in self.lora_A]
        experts: Any = self.get_base_layer()
        with with_deltas(experts, self.parameter_name, deltas):
            yield

    def _delta(self, name: str) -> StackDelta:
        lora_A: Any = self.lora_A
        lora_B: Any = self.lora_B
        A, B = lora_A[name].weight, lora_B[name].weight
        first = A.reshape(self.num_experts, -1, A.shape[1]).mT  # expert by expert
        second = B.reshape(len(B), -1, self.num_experts).permute(2, 1, 0)  # and rank by rank
        return StackDelta(first, second, self.scaling[name])

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:  # noqa: ARG002, FBT001, FBT002 - as PEFT has it
        """Raises ConfigError: bytes of experts are not changed."""
        if peft_compat.to_merge(self, adapter_names):
            raise ConfigError(
                "an adapter on experts in four bits is not merged into their bytes; take it off other layers again "
                "by unmerge_adapter(), save it with save_adapter, and merge it into the files of the base with "
                "shardwise merge-adapter"
            )


_KINDS: dict[type, type] = {lora.Linear: LinearOnFourBits, ParamWrapper: StackOnFourBits}

if (_Linear4bit := getattr(lora, "Linear4bit", None)) is not None:

    class Linear4bitOnFourBits(MergesInFourBits, _Linear4bit):  # type: ignore[misc, valid-type]
        """Where it is."""

    _KINDS[_Linear4bit] = Linear4bitOnFourBits


def let_merge(layer: Any) -> None:
    """Have a layer of PEFT's, which is being put around a weight in four bits, merge as such; in place."""
    layer.__class__ = _KINDS.get(type(layer), type(layer))


def put_on_experts(layers: Iterable[Any]) -> None:
    """Have PEFT's layers on stacks of experts in four bits compute and merge as such; in place."""
    for layer in layers:
        base = layer.get_base_layer()
        if are_experts_in_four_bits(base) and getattr(layer, "parameter_name", None) in base.packings:
            let_merge(layer)
