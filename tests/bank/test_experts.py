"""Adapters on fused experts: as PEFT's ``target_parameters``, without a weight that has one added."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.bank import banking, on_ranks, test_requests
from tests.bank.banking import Recipe, distance, matrices_of, rows_for, train
from tests.bank.on_ranks import bank_of
from tests.truth import require_equal

import shardwise
from shardwise.bank.rows import Request
from shardwise.bank.sampling import Sample
from shardwise.core.errors import ConfigError

STEPS = 20
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def members() -> dict[str, Recipe]:
    return {
        "ada": Recipe({"r": 2, "target_modules": [], "target_parameters": BOTH}, rows=3),
        "bob": Recipe(
            {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"], "target_parameters": BOTH[1:]}, tokens=12
        ),
        "cy": Recipe({"r": 8, "target_modules": ["v_proj", "o_proj"]}),
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return banking.save_experts(tmp_path_factory.mktemp("experts"))


def together(base: Path, steps: int = STEPS) -> dict[str, Any]:
    where = on_ranks.here() if dist.is_initialized() else {}
    bank = bank_of(base, members())
    begin = {name: matrices_of(bank, name) for name in members()}
    train(bank, members(), steps, **where)
    return {name: (matrices_of(bank, name), begin[name]) for name in members()}


def require_as_alone(base: Path, found: dict[str, Any], limit: float, steps: int = STEPS) -> None:
    for name, recipe in members().items():
        own, begin = found[name]
        alone = banking.alone(base, name, recipe, begin, steps=steps, pad_to=16)
        assert distance(own, alone, begin) <= limit, name


def test_experts_of_each_adapter_come_out_as_alone(base):
    """PEFT folds an adapter into the experts' weights; here rows go through both, so sums are in another order."""
    require_as_alone(base, together(base), 1e-5)


def test_experts_on_two_ranks(worlds, base):
    first, second = worlds(2).run(together, base, 6)
    require_equal(first["ada"][0], second["ada"][0])
    require_as_alone(base, first, 1e-5, 6)


def test_grouped_products_have_fewer_groups_than_the_kernel_takes(tmp_path, monkeypatch):
    """128 experts of 9 adapters, the last of which are also computed alone."""
    grouped_mm, groups = F.grouped_mm, []

    def like_cuda(
        rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **keywords: Any
    ) -> torch.Tensor:
        groups.append(len(offs))
        assert len(offs) < 1024, "Can't process more than 1024 groups"
        return grouped_mm(rows, weights, offs=offs, **keywords)

    monkeypatch.setattr(F, "grouped_mm", like_cuda)
    recipes = {f"{number}": replace(members()["ada"], rows=1 + number % 2) for number in range(9)}
    bank = bank_of(banking.save_experts(tmp_path, 128), recipes)
    rows = [(name, rows_for(name, recipe, 0)) for name, recipe in recipes.items()]
    bank.forward_backward(rows)
    together = {name: bank._adapters[name].gradient.clone() for name in recipes}
    assert max(groups) == 7 * 128
    for name, batch in rows[6:]:
        bank.zero_grad(name)
        bank.forward_backward([(name, batch)])
        torch.testing.assert_close(bank._adapters[name].gradient, together[name], rtol=1e-5, atol=1e-7)


def on_the_first_rank(base: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a micro-batch in several passes, in none of which another rank has rows."""
    bank = bank_of(base, members())
    object.__setattr__(bank._base, "max_tokens_per_pass", 64)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    rows = {
        name: rows_for(name, recipe, 0) if is_first else banking.no_rows() for name, recipe in members().items()
    }
    passes = bank.forward_backward(list(rows.items())).passes
    return {name: bank._adapters[name].gradient for name in members()}, passes


def test_a_rank_without_rows_in_any_pass(worlds, base):
    expected, number = on_the_first_rank(base)
    (first, of_first), (second, of_second) = worlds(2).run(on_the_first_rank, base)
    assert of_first == of_second == number > 1
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-7)
    assert not any(gradient.any() for gradient in second.values())


def test_experts_are_as_they_were_without_adapters(base):
    bank = bank_of(base, {})
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        before = bank._model(ids).logits
    banking.create(bank, "ada", members()["ada"])
    bank.forward_backward([("ada", rows_for("ada", members()["ada"], 0))])
    bank.optim_step("ada", lr=0.5)
    with torch.no_grad():
        assert bank._model(ids).logits.equal(before)
    adapted, alone = bank.compute_logprobs([("ada", {"input_ids": ids}), (None, {"input_ids": ids})])
    assert not torch.allclose(adapted[0], alone[0], atol=1e-3)
    torch.testing.assert_close(alone[0], before[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    bank.delete_adapter("ada")
    assert not any("forward" in vars(module) for module in bank._model.modules())


def test_two_banks_on_one_base(base):
    """Each has its adapters on experts, in whatever order they are deleted and added again."""
    ada = members()["ada"]
    both = [("ada", rows_for("ada", ada, 1)), (None, rows_for("ada", ada, 2))]
    alone, earlier = bank_of(base, {"ada": ada}), bank_of(base, {"ada": ada})
    later = shardwise.AdapterBank(earlier._model)
    banking.create(later, "ada", ada)
    earlier.delete_adapter("ada")
    for bank in (alone, later):
        train(bank, {"ada": ada}, 1)
    expected, rows = matrices_of(alone, "ada"), alone.compute_logprobs(both)
    require_equal(matrices_of(later, "ada"), expected)
    banking.create(earlier, "ada", ada)
    later.delete_adapter("ada")
    train(earlier, {"ada": ada}, 1)
    require_equal(matrices_of(earlier, "ada"), expected)
    torch.testing.assert_close(earlier.compute_logprobs(both), rows, rtol=0, atol=0)


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def thirds(logprobs: Any, rows: Any, _config: Any) -> torch.Tensor:
    return -(logprobs[0] * (rows[0]["weights"] / 3)).sum()


def of_every_call(base: Path, default: Any) -> tuple[Any, ...]:
    recipe = replace(members()["bob"], optimizer=banking.sgd, gradient_accumulation_steps=None)
    sampled = test_requests.row(0, 9)
    plain = {key: sampled[key] for key in ("input_ids", "targets")}
    requests = []
    for name in ("x", "y"):  # with equally many rows, so computed together
        requests += [
            Request(name, rows_for("bob", recipe, 0)),
            Request(name, [test_requests.only(sampled, "ppo")], "ppo"),
            Request(name, [plain], thirds),
        ]
    bank = bank_of(base, {}, "auto")
    prompts = [Sample("x", prompt, max_tokens=3, seed=0, prompt_logprobs=True) for prompt in ([1, 2, 3], [4])]
    with default:
        for name in ("x", "y"):
            bank.add_adapter(name, recipe.lora(), optimizer=banking.sgd, reduction="sum")
        losses = [each.loss for each in bank.forward_backward(requests).requests]
        bank.optim_step("x")
        bank.load_state_dict("x", bank.state_dict("x"))
        outputs = bank.generate(prompts)
    scores = [output.prompt_logprobs for output in outputs]
    return losses, matrices_of(bank, "x"), [output.sequences for output in outputs], scores


def test_defaults_of_torch_change_nothing(base):
    losses, matrices, sequences, scores = of_every_call(base, nullcontext())
    for default in (default_dtype(), torch.device("meta")):
        found = of_every_call(base, default)
        assert (found[0], found[2]) == (losses, sequences)
        require_equal(found[1], matrices)
        for one, other in zip(found[3], scores, strict=True):
            assert one.equal(other)


def test_experts_that_are_not_fused_as_known_are_refused(base):
    model = shardwise.from_pretrained(base)
    model.model.layers[0].mlp.experts.has_post_expert_norm = True
    bank = shardwise.AdapterBank(model)
    with pytest.raises(ConfigError, match=r"layers.0.mlp.experts: experts with their own norms"):
        banking.create(bank, "ada", members()["ada"])
    with pytest.raises(ConfigError, match=r"lora_dropout"):
        bank.add_adapter("x", Recipe({"target_modules": [], "target_parameters": BOTH, "lora_dropout": 0.1}).lora())
