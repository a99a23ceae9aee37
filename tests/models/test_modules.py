"""Modules that an initialiser is run for."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.models.initialize import Initialisers
from shardwise.models.view import look_inside


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.written_from_outside = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4), persistent=False)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()


class Model(PreTrainedModel):
    __module__ = "transformers.models.made_up"  # of a user's own classes, those without parameters are passed over
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.beside = nn.Linear(2, 2)
        self.outer = Outer()
        self.seen: list[str] = []
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        self.__dict__.setdefault("seen", []).append(type(module).__name__)
        if isinstance(module, Outer):
            nn.init.constant_(module.inner.written_from_outside, 3.0)
            module.inner.table.fill_(5.0)


def test_a_module_s_initialiser_may_write_into_what_is_in_it():
    with torch.device("meta"):
        model = Model(PretrainedConfig())
    held = look_inside(model)
    model.seen.clear()
    programs = Initialisers(model, held).programs(["outer.inner.written_from_outside"])
    assert len(programs["outer.inner.written_from_outside"].steps) == 1
    assert model.seen == ["Inner", "Outer", "Model"]  # children first, and nothing beside
    computed = Initialisers(model, held).buffers({}, seed=0)
    assert torch.equal(computed["outer.inner.table"].value, torch.full((4,), 5.0))
