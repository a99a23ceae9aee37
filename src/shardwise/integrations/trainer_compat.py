"""Unexported names of transformers' Trainer and of TRL's trainers. No other module uses them.

Checked with transformers 5.19 to 5.23 (in 5.17 and 5.18 the Trainer does not support sharded models) and TRL 1.16.
A missing name is an error of :func:`require_names`. ``tests/canary`` asserts their meanings.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import has_length as has_length

from shardwise.core.errors import ConfigError, lacks, private, require_private, require_version
from shardwise.core.phases import busy_with
from shardwise.fsdp.named_tensors import find_fsdp_root
from shardwise.fsdp.torch_private import original_class

require_version("transformers", "5.19")

PREFIX_CHECKPOINT_DIR = "checkpoint"
"""Start of the name of a checkpoint's folder."""
TOKENS = "_total_train_tokens"
"""Attribute of TRL's trainers, which log it as ``num_tokens``: tokens of all ranks since the first step."""
HOOKED = "_replicated_grad_hook_registered"
"""Mark of a parameter whose gradient is averaged already."""
REFERENCE = "ref"
"""TRL's name of the frozen copy of an adapter that it compares with."""
ANSWERS = "_buffered_inputs"
"""Answers that a trainer of TRL has sampled and uses in several micro-batches, or None."""
MICRO_BATCH = "_step"
"""The number of micro-batches by which such a trainer decides when to sample, and which answers come next."""
REDIRECTION = "_forward_redirection"
"""What calls a method of TRL's distillation trainer within the forward pass of a model."""


def require_names() -> None:
    """Reject a Trainer that would not take a sharded model as it is, or has other methods than those overridden.

    Raises:
        ConfigError: a name is missing.
    """
    require_private("transformers:PreTrainedModel", "is_distributed_loading_by_transformers")
    require_private("transformers:PreTrainedModel", "_is_distributed_loading_by_transformers")
    private("transformers.distributed.fsdp:is_fsdp_managed_module")
    private("transformers.trainer_callback:CallbackHandler.call_event")
    require_private("transformers:Trainer", "_load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state")
    require_private("transformers:Trainer", "_load_scaler _load_best_model _save_checkpoint _save_rng_state _save")
    require_private("transformers:Trainer", "_save_optimizer_and_scheduler _save_scaler _get_output_dir")
    require_private("transformers:Trainer", "_sync_replicated_trainable_parameters get_batch_samples compute_loss")
    require_private("transformers:Trainer", "get_total_train_batch_size _run_epoch _get_dataloader")
    require_private("transformers:Trainer", "_push_from_checkpoint _finish_current_push _finalize_training")
    require_private(
        "transformers:Trainer", "_determine_best_metric _evaluate _get_train_sampler _maybe_log_save_evaluate"
    )
    require_private("transformers:Trainer", "create_accelerator_and_postprocess set_initial_training_values")
    require_private("transformers:Trainer", "_set_signature_columns_if_needed")


def add_marks(model: PreTrainedModel, replicas: int) -> None:
    """Mark a model as sharded by transformers, so that the Trainer neither moves nor wraps it.

    ``_tp_size`` and ``_fsdp_size`` are not set, because PEFT's saving and generation read them, and the Trainer
    does not need them.
    """
    marked: Any = model
    # Read by PreTrainedModel.is_distributed_loading_by_transformers, and by is_fsdp_managed_module.
    marked._is_distributed_loading_by_transformers = marked._is_fsdp_managed_module = True
    if hasattr(Trainer, "_defer_fsdp_gradient_reduction"):  # 5.23; older ones exchange gradients each time
        make_config = private("transformers.distributed.configuration_utils:DistributedConfig")
        marked.config.distributed_config = make_config(dp_replicate_size=replicas)
    # By this name, which FSDP2 changes, label smoothing decides whether labels are those of the next token.
    vars(model)["_get_name"] = partial(str, original_class(model).__name__)


def is_open(model: nn.Module) -> bool:
    """Return whether a model has the marks of :func:`add_marks`."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def require_before_trainer(kind: type, mixin: type) -> None:
    """Raises ConfigError for a class in which a Trainer's methods would override the mixin's."""
    ahead = kind.__mro__[: kind.__mro__.index(mixin)]
    if any(issubclass(other, Trainer) and not issubclass(other, mixin) for other in ahead):
        raise ConfigError(
            f"{kind.__name__}: {mixin.__name__} comes before a Trainer class: "
            f"class {kind.__name__}({mixin.__name__}, Trainer)"
        )


def is_trl_trainer(trainer_class: type) -> bool:
    """Return whether a trainer is one of TRL, which read the head's weight without calling it."""
    return bool(_classes_of_trl(trainer_class))


def _classes_of_trl(trainer_class: type) -> list[type]:
    return [kind for kind in trainer_class.__mro__ if kind.__module__.startswith("trl.")]


def loads_reference(trainer_class: type) -> bool:
    """Return whether a trainer takes no reference model, and loads one by the model's name: of GRPO and RLOO."""
    return _is_of_trl(trainer_class, "GRPOTrainer", "RLOOTrainer")


def has_no_reference(trainer_class: type) -> bool:
    """Return whether ``beta`` of a trainer of TRL is not the weight of a reference model."""
    return _is_of_trl(trainer_class, "CPOTrainer", "ORPOTrainer", "TPOTrainer", "DistillationTrainer")


def _is_of_trl(trainer_class: type, *names: str) -> bool:
    return any(kind.__name__ in names for kind in _classes_of_trl(trainer_class))


def sample_anew(trainer: Any, num_batches: int) -> None:
    """Have a trainer of TRL sample answers in its next step, after ``num_batches`` micro-batches of a pass.

    A pass over the data has whole rounds. Within a round the data repeats its prompts for each micro-batch.
    """
    if hasattr(trainer, ANSWERS):
        setattr(trainer, ANSWERS, None)
        setattr(trainer, MICRO_BATCH, num_batches)


def redirect_through_root(trainer: Any) -> None:
    """Have a trainer of TRL enter the forward pass of the FSDP2 root, which gathers, and not that of PEFT's model.

    Raises:
        ConfigError: TRL lacks a name that is overridden.
    """
    if not hasattr(trainer, REDIRECTION):
        return
    base: Any = private("trl.models.utils:_ForwardRedirection")

    class RootRedirection(base):  # type: ignore[misc]
        def __call__(self, wrapper: nn.Module, _: nn.Module, method: Any, *args: Any, **keywords: Any) -> Any:
            root: Any = find_fsdp_root(wrapper) or wrapper
            return super().__call__(root, root, method, *args, **keywords)

    setattr(trainer, REDIRECTION, RootRedirection())


class ComputesInNormalMode:
    """Hooks by which a sharded model leaves torch's inference mode while it computes, with the other ranks.

    TRL asks reward models in that mode, in which FSDP2 cannot gather on one rank. The model must be frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        # One for each forward pass that has begun. Entered and left by hand, because these are two hooks.
        self._left: list[ExitStack] = []
        model.register_forward_pre_hook(self._leave, prepend=True)  # before FSDP2's, which gathers
        model.register_forward_hook(self._enter_again, always_call=True)

    def _leave(self, *_: Any) -> None:
        computing = ExitStack()
        computing.enter_context(torch.inference_mode(mode=False))
        computing.enter_context(busy_with(""))
        self._left.append(computing)

    def _enter_again(self, *_: Any) -> None:
        self._left.pop().close()


@contextmanager
def replaced_in_trl(trainer_class: type, **replacements: Any) -> Iterator[None]:
    """Replace names in the modules of TRL that define a trainer, within the block.

    Raises:
        ConfigError: no module has a name.
    """
    modules = {kind.__module__ for kind in _classes_of_trl(trainer_class)}
    with ExitStack() as stack:
        for name, value in replacements.items():
            having = [module for module in modules if hasattr(sys.modules[module], name)]
            if not having:
                raise lacks(f"{'|'.join(sorted(modules))}:{name}")
            for module in having:
                stack.enter_context(mock.patch.object(sys.modules[module], name, value))
        yield


def wants_reference(trainer_class: type) -> bool:
    """Return whether a trainer needs a reference model. TRL creates one from the model's name by default."""
    constructors = [vars(kind)["__init__"] for kind in _classes_of_trl(trainer_class) if "__init__" in vars(kind)]
    return any("ref_model" in inspect.signature(constructor).parameters for constructor in constructors)
