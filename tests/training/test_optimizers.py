"""Optimizers by name: which there are, what is refused and when, and what they do to shards."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import Worlds
from tests.training import stepped, tiny

from shardwise.errors import ConfigError
from shardwise.training.configuration.config import read_config
from shardwise.training.optimizing.optimizers import SHORT_NAMES
from shardwise.training.options import NamedOptimizer, TrainOptions
from shardwise.training.parts import parts_of
from shardwise.training.passes.forward import ShardedGradients, WholeGradients, fits_whole
from shardwise.training.session import Session

REFUSED_ON_SHARDS = {
    "rprop": "it cannot take a step with a sharded matrix",
    "torch.optim.LBFGS": "it cannot take a step with a matrix (TypeError",
    "torch.optim.SparseAdam": "it cannot take a step with a matrix (RuntimeError",
    "adafactor": "torch's Adafactor: steps whole tensors, not shards. Use torchao's AdamW8bit.",
    **{
        name: "it is of torchao, which cannot be imported here"
        for name, path in SHORT_NAMES.items()
        if path.startswith("torchao")
    },
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 7))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def world(worlds: Worlds, chats: str, kept: str) -> list[dict[str, Any]]:
    return worlds(2).run(stepped.on_rank, chats, kept)


@pytest.mark.distributed
def test_what_cannot_step_shards_is_refused_by_name_and_the_same_by_all(world: list[dict[str, Any]]) -> None:
    assert world[0]["said"] == world[1]["said"]
    for name, text in world[0]["said"].items():
        start = REFUSED_ON_SHARDS.get(name)
        assert text == "" if start is None else start in text, (name, text)


@pytest.mark.distributed
def test_an_optimizer_that_takes_a_shard_for_the_whole_is_found_out(world: list[dict[str, Any]]) -> None:
    assert "that is sharded over 2 ranks is something else than what it does to the whole one" in world[0]["blind"]


@pytest.mark.distributed
def test_nobody_waits_for_a_rank_whose_step_fails(world: list[dict[str, Any]]) -> None:
    assert world[0]["alone"] == world[1]["alone"]
    fails, without = world[0]["alone"]
    assert (
        "rank 1: optimizer.name='tests.training.stepped.FailsAlone': it cannot take a step with a sharded" in fails
    )
    assert "OSError: no such kernel here" in fails
    assert "rank 1 asks for no collective where rank 0 asks for _c10d_functional.all_gather" in without


@pytest.mark.distributed
def test_adafactor_of_transformers_is_for_one_rank(world: list[dict[str, Any]]) -> None:
    assert "transformers' Adafactor: steps whole tensors, not shards." in world[0]["of transformers"]
    assert stepped.said_of(stepped.of_transformers()) == ""


@pytest.mark.distributed
def test_named_optimizers_train_on_two_ranks_as_on_one(world: list[dict[str, Any]], chats: str) -> None:
    adamw = stepped.trained(chats, stepped.options("adamw")).losses
    for name, losses in world[0]["losses"].items():
        alone = stepped.trained(chats, stepped.options(name)).losses
        # Muon computes in bfloat16, in another order on shards.
        assert losses == pytest.approx(alone, rel=5e-3 if name == "muon" else 1e-5), name
        assert alone[0] == adamw[0]
        assert alone[1:] != adamw[1:]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_a_named_optimizer_goes_on_on_one_rank(
    name: str, world: list[dict[str, Any]], chats: str, kept: str
) -> None:
    whole = stepped.trained(chats, stepped.options(name)).losses
    begun, rest = world[0]["begun"][name], stepped.the_rest(chats, kept, name)
    assert (len(begun), len(rest)) == (1, 3)
    assert [*begun, *rest] == pytest.approx(whole, rel=5e-3 if name == "muon" else 1e-5)


@pytest.mark.distributed
def test_all_ranks_come_to_the_same_early_end(world: list[dict[str, Any]]) -> None:
    assert world[0]["ended"] == world[1]["ended"]
    step, [remark] = world[0]["ended"]
    assert step == 3
    assert remark.startswith("the last 2 evaluations have not been better than ")
    assert "ends after step 3 of 9" in remark


@pytest.mark.distributed
def test_whole_gradients_are_kept_where_there_is_memory_for_them(world: list[dict[str, Any]]) -> None:
    assert [found["accumulation"] for found in world] == [WholeGradients()] * 2
    assert [found["for want of memory"] for found in world] == [ShardedGradients()] * 2
    config = read_config(None, ("model=m", "data=d", "output=o"))
    told = {
        str(kind): Session._remarks(SimpleNamespace(config=config), kind)  # type: ignore[arg-type]
        for kind in (WholeGradients(), ShardedGradients())
    }
    assert [len(texts) for texts in told.values()] == [0, 1]
    assert fits_whole(8 << 30, 12 << 30, 30 << 30)
    assert not fits_whole(16 << 30, 12 << 30, 30 << 30)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("adamv", {}, r"optimizer.name='adamv': there is no such optimizer; did you mean adam\?"),
        ("adamw_torch_fused", {}, r"no such optimizer; did you mean adamw\?"),
        ("torch.optim.Nothing", {}, "torch.optim.Nothing is no class of optimizers"),
        ("torch.optim.Optimizer", {}, "is no class of optimizers"),
        ("tests.training.stepped.Blind", {}, "importing it runs the code of tests.training.stepped"),
        ("tests.training.stepped.NO_OPTIMIZER", {"may_import": True}, "is no class of optimizers"),
        ("no_such_library.Best", {"may_import": True}, "it is of no_such_library, which cannot be imported here"),
        ("adamw_8bit", {}, "it is of torchao, which cannot be imported here .* pip install torchao; or take adamw"),
        ("paged_adamw_8bit", {}, "it is of bitsandbytes, .* take adamw8bit .pip install torchao., or adamw"),
        ("torchao.optim.AdamW8bit", {}, "it is of torchao, .* pip install torchao; or take adamw"),
        (
            "tests.training.stepped.Hoarding",
            {"may_import": True},
            "keeps what checkpoints cannot hold: .*a matrix: seen",
        ),
        ("torch.optim.LBFGS", {}, "it cannot take a step with a matrix"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(name: str, more: dict[str, Any], message: str) -> None:
    assert stepped.said("adamw") == stepped.said("tests.training.stepped.Blind", may_import=True) == ""
    with pytest.raises(ConfigError, match=message):
        stepped.require_optimizer(stepped.options(name, **more))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optimizer=sgd", "optimizer.options={momentun: 0.9}"), "optimizer.options.momentun: SGD takes no such"),
        (("optimizer=sgd", "optimizer.options={lr: 0.9}"), "optimizer.options.lr: it is optimizer.learning_rate"),
        (("optimizer=sgd", "optimizer.beta1=0.9"), "optimizer.beta1 and beta2: SGD takes no betas; leave it out"),
        (("optimizer=sgd", "optimizer.eps=1e-6"), "optimizer.eps: SGD takes no eps; leave it out"),
        (("optimizer=sgd", "optimizer.options={momentum: -1}"), "it cannot be made .Invalid momentum value"),
    ],
)
def test_arguments_that_an_optimizer_does_not_take_are_named(overrides: tuple[str, ...], message: str) -> None:
    config = read_config(None, ("model=m", "data=d", "output=o", *overrides))
    with pytest.raises(ConfigError, match=message):
        stepped.require_optimizer(config.options())


def test_betas_and_eps_are_those_asked_for_or_the_class_s_own() -> None:
    model = tiny.model()

    def group(*overrides: str) -> dict[str, Any]:
        config = read_config(None, ("model=m", "data=d", "output=o", *overrides))
        [part] = parts_of(config.options(), model, 3)
        return part.optimizer.param_groups[0]

    assert (group()["betas"], group()["eps"]) == ((0.9, 0.999), 1e-8)
    assert group("optimizer.beta2=0.95")["betas"] == (0.9, 0.95)
    assert group("optimizer=torch.optim.Adagrad")["eps"] == 1e-10
    assert group("optimizer=sgd", "optimizer.options={momentum: 0.5}")["momentum"] == 0.5


def test_muon_has_the_matrices_and_adamw_the_rest() -> None:
    model = tiny.model()
    parts = {part.name: part for part in parts_of(stepped.options("muon"), model, 3)}
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = {name: {names[parameter] for parameter in part.parameters} for name, part in parts.items()}
    assert type(parts["matrices"].optimizer).__name__ == "Muon"
    assert type(parts["others"].optimizer).__name__ == "AdamW"
    assert "model.embed_tokens.weight" in own["others"]
    assert all("proj" in name for name in own["matrices"])
    assert all("norm" in name or "embed" in name for name in own["others"])


def test_b_matrices_have_the_rate_of_lora_plus() -> None:
    chosen = replace(
        stepped.options("adamw"), weight_decay=0.1, optimizer=NamedOptimizer("adamw", lora_plus_ratio=16.0)
    )
    [part] = parts_of(chosen, stepped.adapted(), 3)

    assert stepped.rates_of(part.optimizer) == [(0.01, 4), (0.16, 4)]
    assert [group["weight_decay"] for group in part.optimizer.param_groups] == [0.1, 0.1]
    with pytest.raises(ConfigError, match="lora_plus_ratio: there are no B matrices of a LoRA"):
        parts_of(chosen, tiny.model(), 3)
    with pytest.raises(ConfigError, match="lora_plus_ratio must be greater than 0"):
        TrainOptions(optimizer=NamedOptimizer(lora_plus_ratio=-1.0))


def test_a_library_of_8_bits_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").touch()
    (tmp_path / "torchao" / "optim.py").write_text("from torch.optim import AdamW as AdamW8bit\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torchao", "torchao.optim"):  # what is imported now is gone afterwards
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    assert stepped.said("adamw_8bit") == ""
    assert "torchao" in sys.modules
