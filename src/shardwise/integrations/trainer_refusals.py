"""What ``ShardwiseTrainer`` refuses before anything is made, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.integrations import trainer_compat as compat
from shardwise.integrations.trainer_doors import is_for_trainer
from shardwise.models.selection import has_adapters


def given_arguments(
    classes: Sequence[type], positional: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by name, as the first of these classes that has a constructor takes them."""
    after = next(found for found in classes if "__init__" in vars(found))
    names = list(inspect.signature(after.__init__).parameters)[1:]  # type: ignore[misc]
    return {**dict(zip(names, positional, strict=False)), **keywords}


def require_trainable(kind: type, given: Mapping[str, Any], world: World) -> None:
    """Refuse what cannot work, before anything is made.

    Raises:
        ConfigError: naming it.
    """
    model, args = given.get("model"), given.get("args")
    if given.get("model_init") is not None or not isinstance(model, nn.Module):
        shown = repr(model) if isinstance(model, str) else type(model).__name__
        raise ConfigError(
            f"{kind.__name__}(model={shown}): ShardwiseTrainer trains a model that is there, brought up by "
            "shardwise.from_pretrained(...) and passed as model=for_trainer(model)"
        )
    if not is_for_trainer(model):
        raise ConfigError(f"{kind.__name__}(model={type(model).__name__}): pass model=for_trainer(model)")
    if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
        raise already_sharded("fsdp" if getattr(args, "fsdp", None) else "deepspeed")
    if given.get("peft_config") is not None:
        raise ConfigError(
            f"{kind.__name__}(peft_config=...): an adapter that comes after sharding would be neither sharded nor "
            "loaded by all ranks alike; bring the model up with from_pretrained(tuning=Lora(config)) instead"
        )
    if not compat.is_of_trl(kind):
        return
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if world.size > 1 and isinstance(head, FSDPModule):
        raise ConfigError(
            f"{kind.__name__}: TRL reads the weight of the model's head without calling it, and the head is a "
            "group of its own, so that its gradient would not be averaged over ranks; shard with a wrap "
            "policy that leaves the head to the root group (the default, Automatic(), does)"
        )
    _require_reference(kind, model, args, given)


def _require_reference(kind: type, model: nn.Module, args: Any, given: Mapping[str, Any]) -> None:
    reference = given.get("ref_model")
    if getattr(args, "precompute_ref_log_probs", False):
        raise ConfigError(
            f"{kind.__name__}(precompute_ref_log_probs=True): TRL hashes the model's weights for that, which it "
            "cannot where they are sharded; leave it out"
        )
    if isinstance(reference, nn.Module) and not is_for_trainer(reference):
        raise ConfigError(
            f"{kind.__name__}(ref_model=...): pass ref_model=for_trainer(reference), sharded as the model is"
        )
    compares = compat.wants_reference(kind) or bool(getattr(args, "beta", 0))
    if reference is None and compares and not has_adapters(model):
        second = "pass ref_model=for_trainer(reference), sharded as the model is"
        hint = second if compat.wants_reference(kind) else "pass beta=0.0"
        raise ConfigError(
            f"{kind.__name__}: compares with a reference, which TRL would load whole on every rank; {hint}, or "
            "train a LoRA, whose reference is the model without it"
        )


def already_sharded(what: str) -> ConfigError:
    return ConfigError(
        f"{what} would have the Trainer shard a model that is sharded already; leave it out: what it says of "
        "sharding is said by from_pretrained(sharding=Sharding(...))"
    )
