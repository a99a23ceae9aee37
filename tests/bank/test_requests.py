"""Requests: several of an adapter, with targets and losses of their own, trained and not, in shared passes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tests import zoo
from tests.bank import banking
from tests.bank.banking import WORDS, Recipe, adamw, distance, matrices_of
from tests.bank.on_ranks import bank_of, here
from tests.support.world import said
from tests.truth import require_equal
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.bank import passes
from shardwise.bank.losses import LOSSES
from shardwise.bank.rows import IGNORED, Request
from shardwise.core.errors import ConfigError, TrainingError
from shardwise.fsdp.torch_private import dispatch_mode_class

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
SUM = {"reduction": "sum"}


def member(r: int = 4, **further: Any) -> Recipe:
    open_window: Any = None
    return Recipe({**LORA, "r": r}, adamw(lr=5e-3), gradient_accumulation_steps=open_window, more=SUM, **further)


def row(seed: int, length: int, width: int | None = None) -> dict[str, torch.Tensor]:
    """A row of which some targets are ignored, with all values that a loss may need."""
    generator = torch.Generator().manual_seed(seed)
    shape = (length,) if width is None else (length, width)
    targets = torch.randint(0, WORDS, shape, generator=generator)
    targets[: length // 3] = IGNORED
    return {
        "input_ids": torch.randint(0, WORDS, (length,), generator=generator),
        "targets": targets,
        "weights": torch.rand(shape, generator=generator) - 0.3,
        "logprobs": -4 - torch.rand(shape, generator=generator),
        "advantages": torch.randn(shape, generator=generator),
    }


def only(values: Mapping[str, torch.Tensor], loss: Any) -> dict[str, torch.Tensor]:
    needs = ("input_ids", "targets", "weights", *(LOSSES[loss].needs if isinstance(loss, str) else values))
    return {key: values[key] for key in needs}


def rows_of(seed: int, loss: Any, width: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Of lengths that are not in one pass."""
    lengths = (5, 60, 17, 9)
    return [only(row(10 * seed + number, length, width), loss) for number, length in enumerate(lengths)]


def dpo(logprobs: Any, rows: Any, config: Any) -> torch.Tensor:
    """Of a pair: log probabilities of both, less those of a reference."""
    chosen, rejected = ((own - each["logprobs"]).sum() for own, each in zip(logprobs, rows, strict=True))
    return -torch.nn.functional.logsigmoid(config["beta"] * (chosen - rejected))


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (name, {}) for name in LOSSES},
    "gspo": ("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    "dpo": (dpo, {"beta": 0.1}),
}


def requests_of(kind: str, step: int) -> list[Request]:
    loss, config = KINDS[kind]
    rows = rows_of(step, loss)
    if kind == "dpo":
        rows = [{**each, "logprobs": each["logprobs"].masked_fill(each["targets"] == IGNORED, 0)} for each in rows]
    return [Request(kind, rows, loss, config, group_size=2 if kind == "dpo" else 1)]


def expected_loss(kind: str, p: torch.Tensor, each: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of a row, as the papers have it: written out, token by token, in double precision."""
    total = p.new_zeros(())
    at = [place for place in range(len(p)) if each["targets"][place] != IGNORED]
    counted = [place for place in at if each["weights"][place] != 0]
    for place in at:
        weight, q, advantage = (
            each[key][place] if key in each else 0.0 for key in ("weights", "logprobs", "advantages")
        )
        ratio = (p[place] - q).exp()
        low, high = (0.5, 2.0) if kind == "gspo" else (0.8, 1.2)
        if kind == "cross_entropy":
            loss = -p[place]
        elif kind == "importance_sampling":
            loss = -ratio * advantage
        elif kind == "ppo":
            loss = -torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
        elif kind == "cispo":
            loss = -ratio.detach().clamp(low, high) * advantage * p[place]
        elif kind == "dro":
            loss = -(advantage * p[place] - 0.025 * (p[place] - q) ** 2)
        else:
            s = (sum(p[other] - each["logprobs"][other] for other in counted) / len(counted)).exp()
            loss = -torch.min(s * advantage, s.clamp(low, high) * advantage) / len(counted)
        total = total + loss * weight
    return total


def alone(
    base: Path, kind: str, recipe: Recipe, begin: Mapping[str, torch.Tensor], steps: int, *, turned: bool = False
) -> Any:
    """Plain PEFT, row by row."""
    with zoo.silenced():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), recipe.lora())
    set_peft_model_state_dict(model, dict(begin))
    model.eval()
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = recipe.optimizer(own)
    for step in range(steps):
        [request] = requests_of(kind, step)
        rows: Any = list(request.rows)
        logprobs = []
        for each in rows:
            targets = each["targets"].clamp(min=0)
            logits = model(each["input_ids"][None], use_cache=False).logits[0]
            p = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
            logprobs.append(p.masked_fill(each["targets"] == IGNORED, 0))
        places = list(range(len(rows)))[:: -1 if turned else 1]
        if kind == "dpo":
            pairs = [(place, place + 1) for place in range(0, len(rows), 2)][:: -1 if turned else 1]
            losses = [dpo([logprobs[a], logprobs[b]], [rows[a], rows[b]], {"beta": 0.1}) for a, b in pairs]
        else:
            losses = [expected_loss(kind, logprobs[place], rows[place]) for place in places]
        for loss in losses:
            loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return {key: values.clone() for key, values in get_peft_model_state_dict(model).items()}


def members() -> dict[str, Recipe]:
    return {kind: member((4, 8, 3)[number % 3]) for number, kind in enumerate(KINDS)}


def share(request: Request) -> Request:
    """The rows of this rank: pairs stay together."""
    if not dist.is_initialized():
        return request
    size = request.group_size or 1
    rows: Any = request.rows
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    return replace(request, rows=[each for group in groups[here()["rank"] :: here()["size"]] for each in group])


def train_all(base: Path, kinds: Sequence[str], steps: int) -> dict[str, Any]:
    """An adapter for each loss, all at once, in several passes."""
    bank = bank_of(base, {kind: members()[kind] for kind in kinds}, "auto")
    object.__setattr__(bank._base, "max_tokens_per_pass", 256)
    begin = {kind: matrices_of(bank, kind) for kind in kinds}
    losses, number_of_passes = [], []
    for step in range(steps):
        output = bank.forward_backward([share(request) for kind in kinds for request in requests_of(kind, step)])
        losses.append([each.loss for each in output.requests])
        number_of_passes.append(output.passes)
        bank.optim_step({kind: {} for kind in kinds})
    trained = {kind: matrices_of(bank, kind) for kind in kinds}
    return {"begin": begin, "trained": trained, "losses": losses, "passes": max(number_of_passes)}


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [(("ppo", "dpo"), 8), pytest.param(tuple(KINDS), 20, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_each_loss_trains_as_in_peft_alone(worlds, base, kinds, steps):
    """On one rank and two, within three times PEFT's distance from itself with rows turned; at least 1e-6."""
    here, first, second = train_all(base, kinds, steps), *worlds(2).run(train_all, base, kinds, steps)
    assert here["passes"] > 1
    assert first["losses"] == second["losses"]
    torch.testing.assert_close(torch.tensor(first["losses"]), torch.tensor(here["losses"]), rtol=1e-4, atol=1e-4)
    for kind in kinds:
        begin = here["begin"][kind]
        expected = alone(base, kind, members()[kind], begin, steps)
        turned = alone(base, kind, members()[kind], begin, steps, turned=True)
        limit = 3 * max(distance(turned, expected, begin), 1e-6)
        require_equal(first["begin"][kind], begin)
        require_equal(first["trained"][kind], second["trained"][kind])
        for each in (here, first):
            assert distance(each["trained"][kind], expected, begin) <= limit, kind


@pytest.mark.parametrize("kind", list(LOSSES))
def test_losses_and_their_gradients_are_those_of_the_papers(kind):
    """Of three rows in a pass; positions without a target are not among them."""
    config = KINDS[kind][1]
    rows = [{key: values.double() for key, values in row(seed, seed + 4).items()} for seed in (1, 2, 3)]
    own = [(-4 - torch.rand(len(each["targets"]), dtype=torch.float64)).requires_grad_() for each in rows]
    expected = sum(expected_loss(kind, p, each) for p, each in zip(own, rows, strict=True))
    counts = [each["targets"] != IGNORED for each in rows]

    def joined(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([of_row[places] for of_row, places in zip(values, counts, strict=True)])

    values = {key: joined([each[key] for each in rows]) for key in ("weights", "logprobs", "advantages")}
    values["rows"] = torch.arange(3).repeat_interleave(torch.tensor([int(each.sum()) for each in counts]))
    found = LOSSES[kind].function(joined(own), values, {**LOSSES[kind].config, **config}).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, own), torch.autograd.grad(expected, own))


@pytest.mark.parametrize("loss", list(LOSSES))
def test_losses_on_a_device_add_nothing_in_an_order_that_varies(loss, monkeypatch):
    """On CUDA ``index_add`` does."""
    monkeypatch.setattr(torch.Tensor, "index_add", None)
    p = torch.zeros(4, 2, device="meta", requires_grad=True)
    values = dict.fromkeys(("weights", "logprobs", "advantages"), torch.zeros(4, 2, device="meta"))
    values["rows"] = torch.zeros(4, dtype=torch.int64, device="meta")
    losses = LOSSES[loss].function(p, values, LOSSES[loss].config)
    assert losses.shape == torch.autograd.grad(losses.sum(), p)[0].shape


def gradient_of(bank: Any, name: str) -> torch.Tensor:
    gradient = bank._adapters[name].gradient.clone()
    bank.zero_grad(name)
    assert not bank._adapters[name].gradient.any()
    return gradient


def test_one_call_or_three_one_pass_or_several(base):
    """Gradients and losses are those of the sum, whatever the passes are."""
    bank, single = bank_of(base, {"ada": member()}), bank_of(base, {"ada": member()})
    object.__setattr__(single._base, "max_tokens_per_pass", 64)
    rows = rows_of(1, "ppo")
    three = [
        Request("ada", rows[:2], "ppo"),
        Request("ada", rows[2:], "ppo"),
        Request("ada", rows_of(2, "dro"), "dro"),
    ]
    at_once = bank.forward_backward(three)
    assert [each.adapter for each in at_once.requests] == ["ada"] * 3
    assert at_once.adapters == {}, "of adapters with one request"
    expected = gradient_of(bank, "ada")
    told = [bank.forward_backward([each]).requests[0].loss for each in three]
    assert told == pytest.approx([each.loss for each in at_once.requests], rel=1e-5)
    torch.testing.assert_close(gradient_of(bank, "ada"), expected, rtol=1e-5, atol=1e-6)
    cut = single.forward_backward(three)
    assert cut.passes > at_once.passes
    torch.testing.assert_close(gradient_of(single, "ada"), expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(cut.requests, at_once.requests, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)


def test_targets_need_not_be_the_next_tokens(base):
    """One token with one target; several targets at a position; and what is ignored is 0."""
    bank = bank_of(base, {"ada": member()})
    rows = [row(1, 1), row(2, 6, 3), row(3, 4)]
    rows[0]["targets"][:] = 5
    rows[1]["targets"][3, 1] = IGNORED
    rows = [only(each, "cross_entropy") for each in rows]
    [found] = bank.compute_logprobs([(None, rows)])
    with zoo.silenced():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for own, each in zip(found, rows, strict=True):
        assert own.shape == each["targets"].shape
        logprobs = model(each["input_ids"][None]).logits[0].log_softmax(-1)
        targets = each["targets"].view(len(own), -1)
        expected = logprobs.gather(1, targets.clamp(min=0)).masked_fill(targets == IGNORED, 0)
        torch.testing.assert_close(own.view(targets.shape), expected.detach(), rtol=1e-4, atol=1e-5)
    loss = bank.forward_backward([("ada", rows)]).requests[0].loss
    assert loss == pytest.approx(
        -sum(float((own * each["weights"]).sum()) for own, each in zip(found, rows, strict=True)), rel=1e-4
    )

    def twice(logprobs: Any, of_group: Any, _config: Any) -> torch.Tensor:
        return -(logprobs[0] * of_group[0]["weights"].mul_(2)).sum()  # in place, which the caller does not see

    with torch.inference_mode():
        copies = [{key: values.clone() for key, values in each.items()} for each in rows]
        output = bank.forward_backward([Request("ada", copies, twice)])
    assert output.requests[0].loss == pytest.approx(2 * loss, rel=1e-4)
    for own, each in zip(rows, copies, strict=True):
        require_equal(own, each)


def test_requests_without_a_backward_pass_share_passes(base):
    """They are as by compute_logprobs, without dropout, and change no gradient; of the base, too."""
    recipe = member()
    recipe = replace(recipe, config={**recipe.config, "lora_dropout": 0.5, "init_lora_weights": False})
    bank, quiet = (bank_of(base, {"ada": recipe, "bob": recipe}) for _ in range(2))
    rows = rows_of(1, "cross_entropy")
    watched = [Request(name, rows, backward=False) for name in ("ada", "bob", None)]
    output = bank.forward_backward([("ada", rows), *watched])
    together = quiet.forward_backward([("ada", rows)])
    assert output.passes == together.passes + 1 or output.passes == together.passes
    torch.testing.assert_close(bank._adapters["ada"].gradient, quiet._adapters["ada"].gradient)
    assert not bank._adapters["bob"].gradient.any()
    assert (bank._adapters["bob"].micro_batches, bank._adapters["ada"].micro_batches) == (0, 1)
    found = bank.compute_logprobs([(name, rows) for name in ("ada", "bob", None)])
    for own, expected in zip(output.requests[1:], found, strict=True):
        torch.testing.assert_close(own.logprobs, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(output.requests[0].logprobs[1], found[0][1]), "dropout"
    bank._adapters["bob"].matrices[next(iter(bank._adapters["bob"].matrices))][0, 0] = math.nan
    bank.forward_backward(watched)
    assert not bank._adapters["bob"].gradient.any(), "not 0 times NaN"


def gathered(base: Path) -> Any:
    bank = bank_of(base, {"ada": member()})
    rows = [only(row(10 + here()["rank"], 4 + here()["rank"]), "cross_entropy")]
    output = bank.forward_backward([Request("ada", rows), Request("ada", rows, backward=False)], gather=True)
    return [each.logprobs for each in output.requests]


def test_outputs_of_all_ranks_on_the_first(worlds, base):
    first, second = worlds(2).run(gathered, base)
    assert [[len(own) for own in each] for each in first] == [[4, 5], [4, 5]]
    assert second == [[], []]


# ── requests that fail ────────────────────────────────────────────────────────────────────────────


def raises(*_: Any) -> torch.Tensor:
    raise ValueError("no such loss")


def finite(logprobs: Any, rows: Any, config: Any) -> torch.Tensor:
    return logprobs[0].sum()


def no_tensor(*_: Any) -> Any:
    return 5.0


def infinite(logprobs: Any, rows: Any, config: Any) -> torch.Tensor:
    return logprobs[0].sum() * math.inf


def not_a_number(logprobs: Any, rows: Any, config: Any) -> torch.Tensor:
    """As if advantages were NaN. Those of rows are refused before."""
    return (logprobs[0] * torch.full_like(logprobs[0], math.nan)).sum()


def huge(logprobs: Any, rows: Any, config: Any) -> torch.Tensor:
    return logprobs[0].sum() * 1e30


OUTCOMES: dict[Any, str] = {
    raises: "ValueError: no such loss",
    infinite: "FloatingPointError: its gradient is not finite",
    not_a_number: "FloatingPointError: its gradient is not finite",
    no_tensor: "TypeError: 5.0 is not a tensor of one number",
    huge: "",
}


@pytest.mark.parametrize("backend", ["loop", "auto"], ids=["loop", "grouped"])
def test_a_loss_of_one_request_is_not_felt_by_others(base, backend):
    """Bitwise, with the same rows in the call. Its own gradient is as before the call."""
    recipes = {"ada": member(), "x": member(8), "eve": member()}
    bank, quiet = (bank_of(base, recipes, backend) for _ in range(2))

    def requests(own: Any) -> list[Request]:
        losses = {"ada": "ppo", "x": own, "eve": "ppo"}
        return [
            Request(name, [only(each, loss) for each in rows_of(3, raises)], loss) for name, loss in losses.items()
        ]

    for each in (bank, quiet):
        each.forward_backward(requests(finite))
    for number, (loss, message) in enumerate(OUTCOMES.items()):
        before = bank._adapters["x"].gradient.clone()
        if message:
            with pytest.raises(
                TrainingError, match=f"the loss of 'x' raised, {message}.*'ada', 'eve' count"
            ) as told:
                bank.forward_backward(requests(loss))
            assert [math.isnan(each.loss) for each in told.value.output.requests] == [False, True, False]
            assert bank._adapters["x"].gradient.equal(before)
            assert bank._adapters["x"].micro_batches == 1
        else:
            bank.forward_backward(requests(loss))
            assert not bank._adapters["x"].gradient.equal(before)
        quiet.forward_backward(requests(finite))
        for name in ("ada", "eve"):
            assert bank._adapters[name].gradient.equal(quiet._adapters[name].gradient)
            assert bank._adapters[name].micro_batches == number + 2


def test_a_mask_that_multiplies_would_be_felt(base):
    """The negative control: if all rows were multiplied with all adapters and by 0, NaN would reach them."""
    bank = bank_of(base, {"ada": member(), "x": member()})
    bank._adapters["x"].matrices[next(iter(bank._adapters["x"].matrices))][0, 0] = math.nan

    def dense(self: Any, segments: Any, x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        for segment in segments:
            mask = torch.zeros(len(x), 1)
            mask[segment.start : segment.stop] = 1
            out += (x @ segment.weights.A.T @ segment.weights.B.T) * mask
        return [x[:0] for _ in segments]

    rows = rows_of(1, "cross_entropy")
    clean = bank.compute_logprobs([("ada", rows), ("x", rows)])[0]
    assert all(bool(own.isfinite().all()) for own in clean)
    with mock.patch("shardwise.bank.kernels.SegmentLoop.forward_rows", dense):
        mixed = bank.compute_logprobs([("ada", rows), ("x", rows)])[0]
    assert not all(bool(own.isfinite().all()) for own in mixed)


# ── chunks of logits ──────────────────────────────────────────────────────────────────────────────


def chunked(base: Path, positions: int | None, **sharding: Any) -> dict[str, Any]:
    """Adapters on the output layer and without, tied and not, with dropout."""
    config = {"r": 4, "target_modules": ["lm_head", "q_proj"], "lora_dropout": 0.3}
    recipes = {"ada": replace(member(), config=config), "bob": member()}
    patch = mock.patch.object(passes.SharedBase, "chunk_positions", positions or 1 << 20)
    with patch:
        bank = bank_of(base, recipes, **sharding)
        rank = here()["rank"] if dist.is_initialized() else 0
        rows = rows_of(1 + rank, "cross_entropy") if rank == 0 else rows_of(2, "cross_entropy")[:1]
        output = bank.forward_backward([("ada", rows), ("bob", rows), Request(None, rows, backward=False)])
    return {
        "logprobs": [each.logprobs for each in output.requests],
        "gradients": {name: bank._adapters[name].gradient.clone() for name in recipes},
        "losses": [each.loss for each in output.requests],
    }


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_of_logits_are_the_logits(tmp_path, tied):
    base = banking.save_base(tmp_path, tied=tied)
    whole, parts = chunked(base, None), chunked(base, 16)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


def test_chunks_have_one_gradient(base):
    """Not one of the size of all positions each: no slices."""
    calls = []

    class Recorded(dispatch_mode_class()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((func.name(), args))
            return func(*args, **(kwargs or {}))

    # The backward pass runs in this thread, so within the mode.
    with Recorded():
        chunked(base, 16)
    slices = [args[1] for name, args in calls if name == "aten::slice_backward"]
    assert not [shape for shape in slices if shape[1:] == [1, 32]]


def chunked_on_ranks(base: Path, positions: int, groups: str) -> Any:
    from shardwise.fsdp.policies import MinSize

    sharding = shardwise.Sharding(wrap=MinSize(1)) if groups == "every layer" else shardwise.Sharding()
    return chunked(base, positions, sharding=sharding)


@pytest.mark.parametrize("groups", ["blocks", "every layer"])
def test_chunks_on_ranks_with_other_numbers_of_positions(worlds, base, groups):
    """Also where the output layer is a group of FSDP2's, which is gathered for each chunk."""
    whole, parts = (worlds(2).run(chunked_on_ranks, base, most, groups) for most in (1 << 20, 16))
    for own, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert whole[0]["losses"] == whole[1]["losses"]


# ── refused ───────────────────────────────────────────────────────────────────────────────────────


def test_invalid_requests_are_refused(base):
    bank = bank_of(base, {"ada": member(), "mean": replace(member(), more={})})
    good = row(1, 6)

    def require(match: str, rows: Any = None, name: str = "ada", **keywords: Any) -> None:
        rows = [only(good, keywords.get("loss", "cross_entropy"))] if rows is None else rows
        with pytest.raises(ConfigError, match=match):
            bank.forward_backward([Request(name, rows, **keywords)])

    require("'ada': there is no loss 'sft'. Use cross_entropy,", [], loss="sft")
    require("'ada': ppo has no setting 'clip'. It has clip_low_threshold", [], loss="ppo", loss_config={"clip": 1})
    for low, high in ((math.nan, 1.2), (-0.1, 1.2), (1.5, 2.0), (0.2, 0.28), (0.8, math.nan), (0.8, -math.inf)):
        config = {"clip_low_threshold": low, "clip_high_threshold": high}
        match = f"clip_low_threshold={low} and clip_high_threshold={high} of ppo: are no bounds of a ratio"
        require(match, [], loss="ppo", loss_config=config)
    for beta in (0, math.nan, math.inf):
        require("of dro: is not a number above 0", [], loss="dro", loss_config={"beta": beta})
    for value in (True, "0.8"):
        config = {"clip_low_threshold": value}
        require("clip_low_threshold=.* of ppo: is not a number", [], loss="ppo", loss_config=config)
    require("loss=5: is not a name or a function", [], loss=5)
    require("group_size=0: pass 1 or more", [], group_size=0)
    require("3 rows are not groups of 2", [only(good, dpo)] * 3, loss=dpo, group_size=2)
    require("'mean': a loss of your own needs reduction='sum'", [], name="mean", loss=dpo)
    require("row 0 has no logprobs, advantages, which ppo needs", [only(good, "cross_entropy")], loss="ppo")
    require(
        "row 0: this loss takes no advantages", [{**only(good, "cross_entropy"), "advantages": good["advantages"]}]
    )
    require("weights need reduction='sum'", name="mean")
    require("row 0 is {'input_ids'.*It needs input_ids", [{"input_ids": good["input_ids"]}])
    require("row 0 is {'input_ids'", [{**only(good, "cross_entropy"), "targets": good["targets"][:3]}])
    require(
        "row 0: weights are \\(2,\\), and its targets \\(6,\\)",
        [{**only(good, "cross_entropy"), "weights": torch.ones(2)}],
    )
    require("row 0 has 65 tokens. It may have 1 to 64", [only(row(1, 65), "cross_entropy")])
    for key, name in (("advantages", "ppo"), ("logprobs", "ppo"), ("weights", "cross_entropy")):
        bad = {**only(good, name), key: torch.full((6,), math.inf)}
        require(f"'ada': {key} are not all finite", [bad], loss=name)
    ids = {**only(good, "cross_entropy"), "input_ids": torch.full((6,), WORDS)}
    require("input_ids are from 64 to 64. The model has 64", [ids])
    targets = {**only(good, "cross_entropy"), "targets": torch.full((6,), -5)}
    require("targets are from -5 to -5", [targets])
    object.__setattr__(bank._base, "max_tokens_per_pass", 32)
    require("1 rows of up to 33 tokens, which must share a pass, have 48", [only(row(1, 33), "cross_entropy")])
    require(
        "2 rows of up to 20 tokens, which must share a pass, have 64",
        [only(row(1, 20), dpo)] * 2,
        loss=dpo,
        group_size=2,
    )
    assert not bank._adapters["ada"].gradient.any()


def other_requests(base: Path) -> dict[str, str]:
    bank = bank_of(base, {"ada": member()})
    rank = here()["rank"]
    rows = [only(row(1, 6), "ppo")]
    told = {
        "loss": said(lambda: bank.forward_backward([Request("ada", rows, ("ppo", "cispo")[rank])])),
        "backward": said(lambda: bank.forward_backward([Request("ada", rows, "ppo", backward=bool(rank))])),
        "number": said(lambda: bank.forward_backward([Request("ada", rows, "ppo")] * (1 + rank))),
        "settings": said(
            lambda: bank.forward_backward([Request("ada", rows, "ppo", {"clip_low_threshold": 0.5 + rank / 4})])
        ),
        "rows": said(lambda: bank.forward_backward([Request("ada", (rows, [{"x": 1}])[rank], "ppo")])),
    }
    assert not bank._adapters["ada"].gradient.any()
    return told


def test_other_requests_on_other_ranks_are_one_error(worlds, base):
    first, second = worlds(2).run(other_requests, base)
    assert first == second
    assert all(
        first[key].startswith("RankMismatchError: rank 1 has") for key in ("loss", "backward", "number", "settings")
    )
    assert first["rows"].startswith("ConfigError: rank 1: 'ada': the rows are not a dict of tensors")
