"""Samples of many adapters at once are what each gives alone, in PEFT's own loop."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from peft import get_peft_model, set_peft_model_state_dict
from tests import zoo
from tests.bank.banking import WORDS, Recipe, adamw, matrices_of, recipes, train
from tests.bank.on_ranks import bank_of, here
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import shardwise
from shardwise.bank import sampling
from shardwise.bank.losses import LOSSES, complete_config
from shardwise.bank.sampling import Sample, cut_batch, split_by_prompt
from shardwise.core.errors import ConfigError

CLOSE = 1e-4
"""Logits of two tokens that differ by less may be in another order."""


def members() -> dict[str, Recipe]:
    own = {name: recipes()[name] for name in ("ada", "cy", "dee")}
    return {name: Recipe(recipe.config, adamw(lr=1e-2)) for name, recipe in own.items()}


def trained(base: Path) -> Any:
    bank = bank_of(base, members())
    where = here() if dist.is_initialized() else {}
    train(bank, members(), 8, **where)
    return bank


@pytest.fixture(scope="module")
def bank(base: Path) -> Any:
    return trained(base)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (length,), generator=generator).tolist() for length in (3, 11, 1, 6)]


def samples(**settings: Any) -> list[Sample]:
    names = ("ada", "cy", None, "dee")
    return [
        Sample(name, prompt, **{"temperature": 0.0, "stop": [], "max_tokens": 12, **settings})
        for name, prompt in zip(names, prompts(), strict=True)
    ]


def test_greedy_tokens_are_those_of_peft(base, bank):
    outputs = bank.generate(samples())
    for sample, output in zip(samples(), outputs, strict=True):
        with zoo.silenced():
            model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            if sample.adapter is not None:
                model = get_peft_model(model, members()[sample.adapter].lora())
                set_peft_model_state_dict(model, matrices_of(bank, sample.adapter))
        prompt = torch.tensor([sample.prompt])
        told = model.eval().generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        [sequence] = output.sequences
        assert len(sequence.tokens) == len(sequence.logprobs) == 12
        assert sequence.stop_reason == "length"
        for token, logprob, expected, logits in zip(
            sequence.tokens,
            sequence.logprobs,
            told.sequences[0, len(sample.prompt) :].tolist(),
            told.logits,
            strict=True,
        ):
            first, second = logits[0].topk(2).values.tolist()
            if token != expected:
                assert first - second < CLOSE
                break
            assert logprob == pytest.approx(float(logits[0].log_softmax(-1)[token]), abs=1e-4)


def test_sequences_depend_on_their_seed_alone(bank):
    """Not on the company, nor on the budget of a batch; and the log probabilities are those of the model."""
    settings = {"temperature": 0.9, "seed": 5, "n": 3, "top_k": 20, "top_p": 0.9}
    together = bank.generate(samples(**settings))
    for sample, output in zip(samples(**settings), together, strict=True):
        [own] = bank.generate([sample])
        assert [each.tokens for each in own.sequences] == [each.tokens for each in output.sequences]
        assert len({tuple(each.tokens) for each in output.sequences}) > 1, "each has its own numbers"
        for each in output.sequences:
            ids = torch.tensor([*sample.prompt, *each.tokens])
            [[logprobs]] = bank.compute_logprobs([(sample.adapter, {"input_ids": ids[None]})])
            assert each.logprobs == pytest.approx(logprobs[len(sample.prompt) - 1 :].tolist(), abs=1e-4)
    assert len({tuple(bank.generate(samples(temperature=1.0)[:1])[0].sequences[0].tokens) for _ in range(3)}) > 1


def test_temperature_top_k_and_top_p_choose_as_they_say(bank):
    """A thousand tokens after one prompt, against the probabilities of transformers."""
    sample = Sample("ada", [5], n=1000, max_tokens=1, temperature=0.7, top_k=4, top_p=0.6, seed=1, stop=[])
    [output] = bank.generate([sample])
    [[logprobs]] = [
        bank.compute_logprobs([("ada", [{"input_ids": torch.tensor([5]), "targets": torch.arange(WORDS)[None]}])])[
            0
        ]
    ]
    expected = logprobs
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.6)):
        expected = warper(None, expected)
    tokens = torch.tensor([each.tokens[0] for each in output.sequences])
    shares = torch.bincount(tokens, minlength=WORDS) / 1000
    expected = expected[0].softmax(-1)
    assert torch.equal(shares > 0, expected > 0)
    assert 1 < int((expected > 0).sum()) < 4, "top_p leaves out some of the top_k"
    torch.testing.assert_close(shares, expected, atol=0.06, rtol=0.0)


def test_rows_that_are_not_greedy_are_sorted_in_parts(bank, monkeypatch):
    """Beside greedy ones, in whose rows nothing is drawn."""
    sort, sorted_rows = torch.Tensor.sort, []

    def counted(values: torch.Tensor, **keywords: Any) -> Any:
        sorted_rows.append(len(values))
        return sort(values, **keywords)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    greedy = samples(max_tokens=2)
    drawn = samples(max_tokens=2, n=10, temperature=0.9, seed=5)
    alone = bank.generate(greedy)
    assert not sorted_rows
    in_parts = bank.generate([*greedy, *drawn])
    assert sorted_rows == [16, 16, 8] * 2
    monkeypatch.setattr(sampling, "_DRAWN_AT_ONCE", 100)
    assert bank.generate([*greedy, *drawn]) == in_parts
    for one, other in zip(alone, in_parts, strict=False):
        assert one.sequences[0].tokens == other.sequences[0].tokens


def test_a_top_k_above_the_vocabulary_is_all_of_it(bank):
    both = [samples(temperature=0.9, seed=5, top_k=top_k)[0] for top_k in (0, 10**400)]
    first, second = bank.generate(both)
    assert first.sequences[0].tokens == second.sequences[0].tokens


def test_a_sequence_ends_with_what_stops_it(bank):
    [whole] = bank.generate(samples()[:1])
    tokens = whole.sequences[0].tokens
    [one, two] = bank.generate([samples(stop=[tokens[4]])[0], samples(stop=[[tokens[3], tokens[4]], 99])[0]])
    first = tokens.index(tokens[4])
    assert (one.sequences[0].tokens, one.sequences[0].stop_reason) == (tokens[: first + 1], "stop")
    assert two.sequences[0].stop_reason == "stop"
    assert two.sequences[0].tokens[-2:] == tokens[3:5]
    assert len(one.sequences[0].logprobs) == first + 1


def test_log_probabilities_of_prompts(bank):
    """Without sampling it is a scoring; the most probable tokens of each position, too."""
    settings = {"prompt_logprobs": True, "top_prompt_logprobs": 3}
    outputs = bank.generate(
        samples(max_tokens=0, **settings) + samples(max_tokens=2, **settings)[:1] + samples()[:1]
    )
    for sample, output in zip(samples(), outputs[:4], strict=True):
        ids = torch.tensor(sample.prompt)
        targets = torch.arange(WORDS).expand(len(ids), WORDS)
        [[logprobs]] = bank.compute_logprobs([(sample.adapter, [{"input_ids": ids, "targets": targets}])])
        expected = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(output.prompt_logprobs, expected, rtol=1e-4, atol=1e-5)
        assert output.sequences[0].tokens == []
        top, values = output.top_prompt_logprobs
        torch.testing.assert_close(values, logprobs[:-1].topk(3).values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logprobs[:-1].gather(1, top), values, rtol=1e-4, atol=1e-5)
        for each in (output.prompt_logprobs, top, values):  # sent between ranks without the values of other rows
            assert each.untyped_storage().nbytes() == each.nbytes
    assert len(outputs[4].sequences[0].tokens) == 2
    torch.testing.assert_close(outputs[4].prompt_logprobs, outputs[0].prompt_logprobs)
    assert outputs[5].prompt_logprobs is None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"n": 0}, "n=0 sequences of 15 tokens"),
        ({"max_tokens": 62}, "n=1 sequences of 65 tokens with the prompt. They may have 64"),
        ({"temperature": -1.0}, "temperature, top_k and top_p"),
        ({"top_p": 0.0}, "temperature, top_k and top_p"),
        ({"prompt": []}, "'ada': the prompt is not a list of token ids"),
        ({"prompt": [WORDS]}, "'ada': the prompt has tokens outside of the model's 64"),
        ({"prompt": [10**30]}, "'ada': the prompt is not a list of token ids"),
        ({"top_prompt_logprobs": WORDS + 1}, "top_prompt_logprobs=65: is not 0 to 64"),
        ({"adapter": "bob"}, "no adapter named 'bob'"),
    ],
)
def test_invalid_samples_are_refused(bank, settings, match):
    with pytest.raises(ConfigError, match=match):
        bank.generate([Sample(**{"adapter": "ada", "prompt": prompts()[0], "max_tokens": 12, **settings})])


def on_ranks(base: Path) -> Any:
    """All of them on rank 1, and one on rank 0."""
    bank = trained(base)
    own = samples(prompt_logprobs=True) if here()["rank"] else samples(max_tokens=3)[:1]
    told = [(each.sequences[0].tokens, each.prompt_logprobs) for each in bank.generate(own)]
    assert bank._base.padding_ignored is True
    bank._base.padding_ignored = False  # rank 1 has four lengths of prompts, and rank 0 has one
    assert [each.sequences[0].tokens for each in bank.generate(own)] == [tokens for tokens, _ in told]
    return told


def test_ranks_sample_their_own(worlds, base, bank):
    first, second = worlds(2).run(on_ranks, base)
    assert (len(first), len(second)) == (1, 4)
    assert len(first[0][0]) == 3
    expected = bank.generate(samples(prompt_logprobs=True))
    same = 0
    for (tokens, logprobs), output in zip(second, expected, strict=True):
        torch.testing.assert_close(logprobs, output.prompt_logprobs, rtol=1e-3, atol=1e-3)
        same += tokens == output.sequences[0].tokens
    assert same >= 3, "trained on two ranks, sums are in another order"


def test_a_sequence_that_has_ended_needs_no_positions(tmp_path):
    """Of a model with learned positions: one ends at the last of them, and the other goes on."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    bank = shardwise.AdapterBank(AutoModelForCausalLM.from_config(config).eval())
    both = [
        Sample(None, list(range(length)), max_tokens=32 - length, temperature=0.0, stop=[]) for length in (30, 2)
    ]
    together = bank.generate(both)
    for sample, output in zip(both, together, strict=True):
        assert output.sequences[0].tokens == bank.generate([sample])[0].sequences[0].tokens
    assert [len(each.sequences[0].tokens) for each in together] == [2, 30]


@pytest.mark.parametrize(("name", "ignores"), [("bart", False), ("rwkv", False), ("llama", True)])
def test_prompts_of_other_lengths_are_not_felt(name, ignores):
    """Also by models that read the padding of a prompt. Those that do not have one batch for all."""
    [specimen] = [each for each in zoo.causal_lm_specimens() if each.name == name]
    bank = shardwise.AdapterBank(zoo.build(specimen))
    own = [Sample(None, prompt, max_tokens=4, temperature=0.0, stop=[]) for prompt in prompts()]
    together = bank.generate(own)
    assert bank._base.padding_ignored is ignores
    for sample, output in zip(own, together, strict=True):
        [expected] = bank.generate([sample])[0].sequences
        assert output.sequences[0].tokens == expected.tokens
        assert output.sequences[0].logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_the_model_is_left_as_it_was(bank):
    bank.generate(samples(prompt_logprobs=True))
    assert not any(
        "_output" in name or "Output" in type(module).__name__ for name, module in bank._model.named_modules()
    )
    assert bank._model(torch.tensor([prompts()[1]])).logits.shape == (1, 11, WORDS)


@given(
    lengths=st.lists(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=0, max_size=9), min_size=1, max_size=3
    ),
    max_tokens=st.integers(60, 300),
)
def test_batches_fit_with_their_padding(lengths, max_tokens):
    units = [list(range(len(of_rank))) for of_rank in lengths]
    assume(any(units))
    batches = cut_batch(units, lengths, max_tokens)
    for rank, of_rank in enumerate(units):
        assert sorted(unit for batch in batches for unit in batch[rank]) == of_rank
    for batch in batches:
        num_steps = max(lengths[rank][unit][1] for rank, of_rank in enumerate(batch) for unit in of_rank)
        for rank, of_rank in enumerate(batch):
            width = max((lengths[rank][unit][0] for unit in of_rank), default=0) + num_steps
            assert len(of_rank) <= 1 or len(of_rank) * width <= max_tokens

    for batch in split_by_prompt(units, lengths):
        assert any(batch)
        for rank, of_rank in enumerate(batch):
            assert len({lengths[rank][unit][0] for unit in of_rank}) <= 1
    for rank, of_rank in enumerate(units):
        assert sorted(unit for batch in split_by_prompt(units, lengths) for unit in batch[rank]) == of_rank


def test_a_batch_of_long_prompts_and_long_continuations_is_cut():
    lengths = [[(80, 10), (10, 80), (85, 5), (5, 85)]]
    assert cut_batch([[0, 1, 2, 3]], lengths, 360) == [[[3, 1]], [[0, 2]]]
    assert cut_batch([[0, 1, 2, 3]], lengths, 680) == [[[0, 1, 2, 3]]]


UNBOUNDED = {"clip_low_threshold": 0, "clip_high_threshold": math.inf}


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", {}),
        *((loss, config) for loss in ("ppo", "cispo", "gspo") for config in ({}, UNBOUNDED)),
    ],
)
def test_a_position_without_weight_has_no_gradient_whatever_its_ratio(loss, config):
    p = torch.tensor([-1.0, -1.0], requires_grad=True)
    values = {
        "weights": torch.tensor([1.0, 0.0]),
        "logprobs": torch.tensor([-1.0, -200.0]),
        "advantages": torch.tensor([1.0, 1.0]),
        "rows": torch.tensor([0, 0]),
    }
    LOSSES[loss].function(p, values, complete_config("", loss, config)).sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == [-1.0, 0.0]
