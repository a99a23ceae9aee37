"""A tuning of one's own, in one file: norms alone are trained."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from shardwise.core.expression import Bindings
from shardwise.models.lora.inject import StoredAdapter, Tuned
from shardwise.models.tunings import Tuning


@dataclass(frozen=True)
class OnlyNorms(Tuning):
    """The weights of norms are trained, and nothing else."""

    def prepare(self, base: PreTrainedModel, bindings: Bindings, _adapters: Mapping[str, StoredAdapter]) -> Tuned:
        for name, parameter in base.named_parameters():
            parameter.requires_grad_("norm" in name.split(".")[-2])
        return Tuned(base, base, bindings, notes=("norms are trained",))
