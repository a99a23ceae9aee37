"""Initial values from (seed, FQN): the same for every sharding, and what the initializer would give."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.core.errors import KeyMismatchError
from shardwise.core.layout import LocalBox
from shardwise.core.tensors import Box, Strided, contiguous_strides
from shardwise.fsdp.named_tensors import boxes_at, collect_tensors
from shardwise.models import initial_programs
from shardwise.models.initial_programs import ProgramTensor, values_from_program
from shardwise.models.initialize import Initializers, list_unfit_programs


def program_of(init, shape=(40, 50), dtype=torch.float32):
    tensor = ProgramTensor.fresh(shape, dtype)
    with torch.no_grad(), initial_programs.record_truncated_normal():
        init(tensor)
    return tensor.program


def values_of(program, shape, boxes, *, seed=0, fqn="w"):
    out = torch.full(shape, float("nan"), dtype=program.dtype)
    for target, values in values_from_program(program, out, boxes, seed=seed, fqn=fqn):
        target.copy_(values)
    return out


def whole_value(program, **seeds):
    box = Box.whole(program.shape)
    return values_of(program, program.shape, (LocalBox(box, Strided.contiguous(box.sizes)),), **seeds)


INITS = {
    "normal": lambda w: nn.init.normal_(w, 1.0, 0.5),
    "uniform": lambda w: nn.init.uniform_(w, -2, 3),
    "truncated": lambda w: nn.init.trunc_normal_(w, 0.0, 0.02, -0.04, 0.04),
    "xavier": lambda w: nn.init.xavier_uniform_(w),
    "kaiming": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "constant": lambda w: nn.init.constant_(w, 3.5),
    "padding row": lambda w: (nn.init.normal_(w), w[3].zero_()),
    "rows": lambda w: (nn.init.zeros_(w), w[10:20].fill_(1.0), w[-1].normal_()),
    "overwritten": lambda w: (nn.init.ones_(w), nn.init.normal_(w, 0.0, 0.1)),
}


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("block", [1 << 20, 64, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_parts_of_the_whole(name, block, dim, monkeypatch):
    monkeypatch.setattr(initial_programs, "BLOCK_NUMEL", block)
    shape = (22, 10)
    program = program_of(INITS[name], shape)
    assert program.is_elementwise
    whole = whole_value(program)
    assert not whole.isnan().any()
    for size in (2, 3, 8, 64):
        chunks, parts = whole.chunk(size, dim), []
        for rank in range(size):
            rows = chunks[rank].shape[dim] if rank < len(chunks) else 0
            part = (rows, 10) if dim == 0 else (22, rows)
            boxes = boxes_at(shape, (Shard(dim),), (size,), (rank,), contiguous_strides(part))
            parts.append(values_of(program, part, boxes))
        assert torch.equal(torch.cat(parts, dim), whole)


def test_distributions_are_those_requested():
    big = (400, 500)
    normal = whole_value(program_of(INITS["normal"], big))
    assert normal.mean() == pytest.approx(1.0, abs=0.01)
    assert normal.std() == pytest.approx(0.5, rel=0.01)
    truncated = whole_value(program_of(INITS["truncated"], big))
    assert truncated.abs().max() <= 0.04
    assert truncated.std() == pytest.approx(0.02 * 0.8796, rel=0.02)
    xavier = whole_value(program_of(INITS["xavier"], big))
    assert xavier.abs().max() == pytest.approx((6 / 900) ** 0.5, rel=0.01)  # fan-in and fan-out of the whole
    padded = whole_value(program_of(INITS["padding row"], (40, 50)))
    assert (padded[3] == 0).all()
    assert (padded[2] != 0).all()


def test_seed_and_name_choose_the_values():
    program = program_of(INITS["normal"])
    assert torch.equal(whole_value(program, seed=1, fqn="a"), whole_value(program, seed=1, fqn="a"))
    assert not torch.equal(whole_value(program, seed=1, fqn="a"), whole_value(program, seed=2, fqn="a"))
    assert not torch.equal(whole_value(program, seed=1, fqn="a"), whole_value(program, seed=1, fqn="b"))


@pytest.mark.parametrize(
    "init",
    [
        nn.init.orthogonal_,
        lambda w: w.mul_(w.mean()),
        lambda w: w.t().zero_(),
        lambda w: w.copy_(torch.rand(50)),  # drawn by the initializer: not from the name of the tensor
    ],
)
def test_initializers_that_are_not_elementwise_are_recognized(init):
    assert not program_of(init).is_elementwise


class Orthogonal(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, 6))
        self.loaded = nn.Parameter(torch.full((5,), 7.0))

    def reset_parameters(self):
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.loaded)


def test_an_orthogonal_tensor_is_initialized_whole_within_the_budget():
    model = Orthogonal()
    held = collect_tensors(model)
    assert not Initializers(model, held).programs({"weight"})["weight"].is_elementwise
    state = torch.get_rng_state()
    one, other = (Initializers(model, held).initialize_whole(held[0], seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, other)
    torch.testing.assert_close(one.T @ one, torch.eye(6))
    assert (model.loaded == 7).all()
    found = Initializers(model, held).programs({"weight"})
    assert list_unfit_programs(found, 1 << 20) == []
    (fault,) = list_unfit_programs(found, 100)
    assert "weight: its initializer needs the full tensor, 288 bytes" in fault


class ByData(nn.Module):
    """Its initializer writes through ``.data``, which leaves the versions of tensors unchanged."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, 6, device="meta"))
        self.register_buffer("scale", torch.empty((), device="meta"), persistent=False)

    def reset_parameters(self):
        nn.init.orthogonal_(self.weight.data)
        self.scale.data.fill_(2)


def test_what_is_written_through_data_is_initialized():
    model = ByData()
    held = collect_tensors(model)
    weight = next(item for item in held if item.fqn == "weight")
    found = Initializers(model, held).initialize_whole(weight, seed=3)
    torch.testing.assert_close(found.T @ found, torch.eye(6))
    assert Initializers(model, held).buffers({}, seed=0)["scale"].value == 2


def test_a_tensor_that_nothing_writes_is_not_left_as_zeros():
    """Also where an initializer could not be traced, so that nothing could be foreseen."""
    model = Orthogonal()
    model.forgotten = nn.Parameter(torch.empty(3))
    held = collect_tensors(model)
    forgotten = next(item for item in held if item.fqn == "forgotten")
    with pytest.raises(KeyMismatchError, match="forgotten: is missing, and no initializer of the model writes it"):
        Initializers(model, held).initialize_whole(forgotten, seed=0)


def test_the_user_s_random_state_is_left_alone():
    model = nn.Linear(4, 4)
    state = torch.get_rng_state()
    Initializers(model, collect_tensors(model)).programs({"weight", "bias"})
    assert torch.equal(torch.get_rng_state(), state)


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


def test_a_module_s_initializer_may_write_into_what_is_in_it():
    with torch.device("meta"):
        model = Model(PretrainedConfig())
    held = collect_tensors(model)
    model.seen.clear()
    programs = Initializers(model, held).programs(["outer.inner.written_from_outside"])
    assert len(programs["outer.inner.written_from_outside"].steps) == 1
    assert model.seen == ["Inner", "Outer", "Model"]  # children first, and nothing beside
    computed = Initializers(model, held).buffers({}, seed=0)
    assert torch.equal(computed["outer.inner.table"].value, torch.full((4,), 5.0))
