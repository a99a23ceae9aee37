"""Rows of every causal language model have in a mixed call the log probabilities that they have alone."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests import zoo

import shardwise
from shardwise.bank import passes
from shardwise.bank.sampling import Sample
from shardwise.core.errors import ConfigError

LENGTHS = (9, 20, 14, 3)
OWN_LAYERS = {
    *("axk2", "big_bird", "blt", "cpmant", "deepseek_v4", "dots3_note", "dots3_note_text", "hy_v4"),
    *("llama4", "llama4_text", "phimoe", "prophetnet", "qwen4_exp", "qwen4_exp_text", "reformer", "xlnet"),
}
"""Some of their linear layers have other inputs or outputs than rows of tokens, or no gradient: no targets."""
PADDED_OTHERWISE = {
    *("axk2", "cpmant", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4", "prophetnet"),
}
"""Models of transformers whose padded rows are not what they are alone, in no batch: attention chooses padding.
Their rows have to be those of the model's own padded batch."""
NOT_SAMPLED = {"blt", "cpmant", "roformer"}
"""Models of transformers that generate nothing from left-padded rows, or whose positions are not of their rows."""
CHUNK = 16
"""Positions of a chunk of logits: the rows have several."""


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, zoo.VOCAB // 2, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": each, "targets": each.roll(-1)} for each in ids]


def differences(name: str, model: Any) -> dict[str, float]:
    """Of the base, to the model alone; of an adapter on all linear layers, to a call with one row alone."""
    bank = shardwise.AdapterBank(model)
    own = rows()
    with torch.no_grad():
        expected = [
            model(each["input_ids"][None], use_cache=False)
            .logits[0]
            .float()
            .log_softmax(-1)
            .gather(1, each["targets"][:, None])[:, 0]
            for each in own
        ]
    if name in PADDED_OTHERWISE:
        assert distance(logprobs_of_padded(model, own), expected) > 1e-3, "it is an exception no longer"
        expected = logprobs_of_padded(model, own)
    found = {"base": distance(bank.compute_logprobs([(None, own)])[0], expected)}
    if name not in NOT_SAMPLED:
        found["sampled"] = distance(sampled(bank, together=True), sampled(bank, together=False))
    if name in OWN_LAYERS:
        return found
    try:
        bank.add_adapter("ada", LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    except ConfigError:  # experts that are not fused, convolutions, layers that are one
        return found
    together = bank.compute_logprobs([(None, own), ("ada", own)])
    alone = [bank.compute_logprobs([("ada", [each])])[0][0] for each in own]
    found["beside an adapter"] = distance(together[0], expected)
    if name not in PADDED_OTHERWISE:
        found["adapter"] = distance(together[1], alone)
    bank.forward_backward([("ada", own)])
    assert bank._adapters["ada"].gradient.isfinite().all()
    return found


def sampled(bank: Any, *, together: bool) -> list[torch.Tensor]:
    """Log probabilities of the most probable sequences, with prompts of several lengths at once or one by one."""
    own = [Sample(None, each["input_ids"].tolist(), max_tokens=4, temperature=0.0, stop=[]) for each in rows()]
    outputs = bank.generate(own) if together else [bank.generate([each])[0] for each in own]
    return [torch.tensor(output.sequences[0].logprobs) for output in outputs]


def logprobs_of_padded(model: Any, own: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Of the model alone, with all rows in a batch that is padded as a pass is."""
    ids, mask = torch.zeros((2, len(own), 32), dtype=torch.int64)
    for number, each in enumerate(own):
        ids[number, : len(each["input_ids"])] = each["input_ids"]
        mask[number, : len(each["input_ids"])] = 1
    with torch.no_grad():
        logprobs = model(ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
    return [
        of_row[: len(each["targets"])].gather(1, each["targets"][:, None])[:, 0]
        for of_row, each in zip(logprobs, own, strict=True)
    ]


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, absolute of numbers below 1 and relative of others."""
    pairs = zip(found, expected, strict=True)
    return max(float(((one - other).abs() / (1 + other.abs())).max()) for one, other in pairs)


def failures_of(specimens: list[Any]) -> tuple[int, dict[str, str]]:
    compared, failures = 0, {}
    for specimen in specimens:
        try:
            model = zoo.build(specimen)
        except zoo.CannotShrink:
            continue
        try:
            with torch.no_grad():
                model(rows()[0]["input_ids"][None], use_cache=False)
        except Exception:  # a model that needs other inputs
            continue
        try:
            found = differences(specimen.name, model)
        except ConfigError:  # a base that is refused by name
            continue
        except Exception as error:
            failures[specimen.name] = f"{type(error).__name__}: {error}"[:300]
            continue
        compared += 1
        if not max(found.values()) <= 1e-5:
            failures[specimen.name] = str(found)
    return compared, failures


def few_specimens() -> list[Any]:
    """Dense models, and one of experts."""
    return [each for each in zoo.representative_specimens() if each.name in ("gpt2", "kimi_linear", "llama")]


def test_dense_models_and_one_of_experts(monkeypatch):
    monkeypatch.setattr(passes.SharedBase, "chunk_positions", CHUNK)
    specimens = few_specimens()
    assert failures_of(specimens) == (len(specimens), {})


@pytest.mark.slow
def test_logits_at_once():
    specimens = few_specimens()
    assert failures_of(specimens) == (len(specimens), {})


@pytest.mark.slow
def test_every_architecture(monkeypatch):
    monkeypatch.setattr(passes.SharedBase, "chunk_positions", CHUNK)
    compared, failures = failures_of(zoo.causal_lm_specimens())
    assert not failures
    assert compared >= 100
