"""Answers under FSDP2: ranks in step, nothing left gathered."""

from __future__ import annotations

import pytest
import torch
from tests.training import stepping

from shardwise.training.generation import evaluating, generate


@pytest.mark.distributed
def test_ranks_with_prompts_and_lengths_of_their_own(worlds):
    """The first has one prompt, the second two that go on for longer, the third none."""
    for found in worlds(3).run(stepping.answers):
        assert found["found"] == found["expected"]
        assert len(found["found"]) == found["rows"]
        assert not found["gathered"]
        assert found["training"]


@pytest.mark.distributed
def test_a_model_of_peft_answers(worlds):
    assert worlds(2).run(stepping.adapted_answers) == [[True, []], [True, []]]


def test_every_module_is_in_its_own_mode_again():
    model = stepping.qwen3().train()
    model.model.layers[0].eval()

    def fail() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.is_grad_enabled()
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training


def test_alone():
    model = stepping.qwen3(eos_token_id=2, pad_token_id=0)
    prompt = torch.arange(3, 9).unsqueeze(0)
    keywords = {"do_sample": False, "max_new_tokens": 3, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(generate(model, prompt, **keywords), model.eval().generate(input_ids=prompt, **keywords))
