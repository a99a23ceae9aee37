"""What of a base would let one tenant be felt by another, or by chance: such a base is refused, by name.

[Note: What couples rows] Rows of a batch are computed side by side, and nearly all of a transformer treats each for
itself. What does not: normalisation over the batch; rotary embeddings whose frequencies follow from the longest row
(dynamic, longrope); losses and capacities of routers, which are counted over all tokens; whatever draws from
torch's random generator, whose numbers depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.errors import ConfigError, TrainingError
from shardwise.models.torch_words import dropout_of, is_compiled_in_place, normalises_over_rows, splitting_dim
from shardwise.models.view import canonical

_BY_LONGEST_ROW = ("dynamic", "longrope")


def require_base(model: nn.Module, ranks: int) -> PreTrainedModel:
    """Refuse a model that cannot be the base of many adapters.

    Raises:
        ConfigError: naming everything that is wrong.
    """
    if hasattr(model, "peft_config") or not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is not a model of transformers without adapters; bring the base up by "
            "shardwise.from_pretrained without tuning="
        )
    faults = [*_headless(model), *_compiled(model), *_by_modules(model), *_by_config(model), *_placed(model, ranks)]
    if faults:
        raise ConfigError(
            f"{type(model).__name__} cannot be the base of many adapters:\n  " + "\n  ".join(faults[:20])
        )
    return model


def _headless(model: PreTrainedModel) -> Iterator[str]:
    if model.get_output_embeddings() is None:
        yield f"{type(model).__name__} gives no logits of tokens; take the class with the head (...ForCausalLM)"
    if getattr(model.config, "is_encoder_decoder", False):
        yield "it has an encoder of its own, for which a bank has no rows; take a causal language model"


def _compiled(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if is_compiled_in_place(module):
            yield (
                f"{canonical(name) or 'the model'} is compiled, and would not notice adapters that come later; "
                "bring it up without compile"
            )
            return


def _by_modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if normalises_over_rows(module):
            yield f"{canonical(name)} is a {type(module).__name__}, which normalises over all tenants' rows"
        kinds = getattr(module, "rope_type", None)
        found = {str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])}
        if both := sorted(found.intersection(_BY_LONGEST_ROW)):
            yield (
                f"{canonical(name)} has {both[0]} rotary embeddings, which follow from the longest row of all "
                "tenants; set rope_type to another in the config"
            )


def _by_config(model: nn.Module) -> Iterator[str]:
    for config in _configs(model):
        if getattr(config, "output_router_logits", False):
            yield (
                "config.output_router_logits is on, and a router's loss is counted over all tenants' tokens; set "
                "it to false"
            )
        for key, value in vars(config).items():
            if key in ("expert_capacity", "capacity_factor") and value:
                yield f"config.{key}={value}: an expert that is full drops tokens, whoever's they are"


def _placed(model: nn.Module, ranks: int) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            split = [place for place in parameter.placements if splitting_dim(place) is not None]
            if len(split) > 1 or parameter.device_mesh.size() != ranks:
                yield (
                    f"{canonical(name)} is {parameter.placements} on a mesh of {parameter.device_mesh.size()} of "
                    f"{ranks} ranks; every rank must have rows of its own: shard over all of them by FSDP2 alone"
                )
                return


def require_no_chance(model: nn.Module) -> None:
    """Refuse a base in training mode that draws random numbers in its forward pass.

    Raises:
        ConfigError: naming what does.
    """
    if not model.training:
        return
    faults = [
        f"{canonical(name)} has p={dropout_of(module)}"
        for name, module in model.named_modules()
        if dropout_of(module) > 0 and module.training
    ]
    faults += [
        f"config.{key}={value}"
        for config in _configs(model)
        for key, value in vars(config).items()
        if ("dropout" in key or "jitter" in key or key.endswith(("layerdrop", "pdrop")))
        and isinstance(value, float)
        and value > 0
    ]
    if faults:
        raise ConfigError(
            f"the base draws random numbers in training mode ({', '.join(faults[:4])}), which would depend on who "
            "else is there; call model.eval(), or set them to 0. Adapters have dropout of their own (lora_dropout)"
        )


@contextmanager
def no_random_numbers(device: torch.device) -> Iterator[None]:
    """At the end of the block torch's random generators are where they were.

    Raises:
        TrainingError: they are not: something draws in a way that nobody could foresee.
    """
    before = _states(device)
    yield
    if not all(one.equal(other) for one, other in zip(before, _states(device), strict=True)):
        raise TrainingError(
            "the base has drawn random numbers, which depend on who else is there; call model.eval(), or take out "
            "what draws them. No gradient of this call is kept"
        )


def _states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _configs(model: nn.Module) -> list[Any]:
    config: Any = getattr(model, "config", None)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [each for each in (config, *parts) if each is not None]
