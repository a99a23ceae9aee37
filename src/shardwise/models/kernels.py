"""Kernels of other libraries in place of functions of a model: those of Liger, and those of the hub.

[Note: Kernels before sharding] Both libraries replace ``forward`` of modules, and leave their parameters alone.
Liger finds modules by their names in the model's class. So it comes first: before PEFT's layers, before blocks are
recomputed and compiled, and before FSDP2 makes classes of its own. transformers chooses kernels of the hub by the
device of the parameters, again at each change between training and evaluation. So these wait until there is memory.
"""

from collections.abc import Mapping

from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils.import_utils import is_kernels_available

from shardwise.core.errors import ConfigError
from shardwise.models.four_bit.layers import are_experts_in_four_bits


def apply_liger(model: PreTrainedModel, config: Mapping[str, bool]) -> bool:
    """Apply Liger's kernels to a model on meta. Return whether it has any for the model.

    Args:
        model: of transformers, without adapters.
        config: arguments of Liger's function for the model's class. Those that it does not have are ignored.

    Raises:
        ConfigError: liger-kernel is not installed, or cannot be applied.
    """
    before = _count_replaced(model)
    try:
        apply_liger_kernel(model, dict(config))
    except Exception as error:  # of a library that patches modules by their names: any
        raise ConfigError(
            f"use_liger_kernel: cannot be applied to {type(model).__name__}, {type(error).__name__}: {error}. Run "
            "pip install -U liger-kernel, or remove the key"
        ) from error
    return _count_replaced(model) > before


def _count_replaced(model: PreTrainedModel) -> int:
    return sum("forward" in vars(module) for module in model.modules())


def require_hub_kernels(*, load_weights: bool, is_compiled: bool) -> None:
    """Check that layers can be replaced by kernels of the hub.

    Raises:
        ConfigError: the package is missing, nothing is loaded, or blocks are compiled.
    """
    if not is_kernels_available():
        raise ConfigError(
            "use_kernels: the package kernels is not installed, or not in a version that transformers takes. Run "
            "pip install 'transformers[kernels]'"
        )
    if not load_weights:
        raise ConfigError(
            "use_kernels: kernels are chosen by the device of the weights, which stay on meta with "
            "load_weights=False. Call model.set_use_kernels(True) once they are restored"
        )
    if is_compiled:
        raise ConfigError(
            "use_kernels: transformers does not choose kernels that can be compiled. Leave out use_kernels, or "
            "torch_compile and Sharding(compile=...)"
        )


def require_whole_experts(model: PreTrainedModel) -> None:
    """Check that no experts are in four bits, which kernels of the hub would take for numbers.

    Raises:
        ConfigError: some are.
    """
    packed = next((name for name, module in model.named_modules() if are_experts_in_four_bits(module)), None)
    if packed is not None:
        raise ConfigError(f"use_kernels: {packed} is in four bits, which no kernel of the hub reads. Leave it out")
