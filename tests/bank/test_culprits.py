"""A tenant that breaks a pass off is found, and the others go on as if it had not."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bank import banking, failing
from tests.bank.banking import adapter
from tests.bank.failing import members, rows_of, trouble
from tests.bank.test_alone import bank_of, require_equal
from tests.bank.test_isolation import everything, poisoned

import shardwise
from shardwise.bank.backends import GroupedAlways, LoopedAlways
from shardwise.bank.in_step import longest
from shardwise.errors import ConfigError, DisagreementError, ShardwiseError, TrainingError
from shardwise.models.torch_words import Gather

OTHERS = ("ada", "bob", "dee")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return banking.save_base(tmp_path_factory.mktemp("base"))


def gradients(bank: Any) -> dict[str, torch.Tensor]:
    return {name: tenant.gradient.clone() for name, tenant in bank._tenants.items()}


@pytest.mark.parametrize("backend", [LoopedAlways(), GroupedAlways()], ids=["loop", "grouped"])
@pytest.mark.parametrize("kind", ["forward", "backward", "matrices"])
def test_the_others_go_on_to_the_bit(base, kind, backend):
    """Also those in the middle of a window, and those whose products are taken together with the culprit's."""
    quiet, bank = bank_of(base, members(), backend), bank_of(base, members(), backend)
    if kind == "matrices":
        poisoned(bank, float("nan"))
    before = adapter(bank, "x")
    for number in range(4):
        with trouble(bank, kind):
            told = failing.go(bank, number)
        expected = failing.go(quiet, number)
        assert told.tenants.keys() == set(OTHERS)
        for name in OTHERS:
            assert told.tenants[name].loss == expected.tenants[name].loss
            require_equal(
                dict(enumerate(told.tenants[name].logprobs)), dict(enumerate(expected.tenants[name].logprobs))
            )
        assert told.backends == expected.backends
        assert told.failures.keys() == {"x"}
        assert isinstance(told.failures["x"], TrainingError)
        assert "'x', whose rows fail alone, too: ValueError: not " in str(told.failures["x"])
    for name in OTHERS:
        require_equal(everything(bank, name), everything(quiet, name))
    require_equal(adapter(bank, "x"), before)
    with pytest.raises(ConfigError, match="the window of 'x' has 0 micro-batches of 1"):
        bank.optim_step("x")
    if kind != "matrices":
        bank.forward_backward([("x", rows_of("x", members()["x"], 0))])
        assert bank.optim_step("x").is_taken


def test_a_culprits_own_window_goes_on_too(base):
    """What it had gathered is there to the bit, and other rows may be given in place of those."""
    recipe = {name: failing.members()[name] for name in ("bob", "ada")}
    bank, quiet = bank_of(base, recipe), bank_of(base, recipe)
    for each in (bank, quiet):
        each.forward_backward([("bob", rows_of("bob", recipe["bob"], 0))])
    gathered = gradients(bank)["bob"]
    with trouble(bank, "forward"):
        told = bank.forward_backward([(name, rows_of(name, recipe[name], 1, bad=name == "bob")) for name in recipe])
    assert told.failures.keys() == {"bob"}
    assert gradients(bank)["bob"].equal(gathered)
    assert gathered.any()
    for each in (bank, quiet):
        each.forward_backward([("bob", rows_of("bob", recipe["bob"], 2))])
        each.optim_step("bob")
    require_equal(everything(bank, "bob"), everything(quiet, "bob"))


def test_several_culprits_and_one_in_a_pass_of_its_own(base):
    """Of a length that nobody else has: what is wrong may be the length, so its pass is not run again."""
    own = failing.members()
    bank, quiet = (
        shardwise.AdapterBank(shardwise.from_pretrained(base), backend=LoopedAlways(), pad_to=4) for _ in range(2)
    )
    for name, recipe in own.items():
        banking.create(bank, name, recipe)
        banking.create(quiet, name, recipe)
    lengths: list[int] = []
    handle = bank._model.model.embed_tokens.register_forward_hook(
        lambda _module, args, _output: lengths.append(args[0].shape[1])
    )
    rows = {name: rows_of(name, own[name], 0, bad=name in ("x", "dee")) for name in own}
    del rows["dee"]["attention_mask"]  # all of its 15 tokens
    batches = list(rows.items())
    with trouble(bank, "forward"):
        told = bank.forward_backward(batches)
    handle.remove()
    calm = quiet.forward_backward(batches)
    assert told.failures.keys() == {"x", "dee"}
    assert told.tenants.keys() == {"ada", "bob"}
    assert (told.passes, calm.passes) == (2, 3)
    assert lengths[-2:] == [8, 12]
    for name in told.tenants:
        assert gradients(bank)[name].equal(gradients(quiet)[name])
    assert not gradients(bank)["x"].any()
    assert not gradients(bank)["dee"].any()


@pytest.mark.parametrize("bad", [(), ("ada", "bob", "x", "dee"), ("ada",)], ids=["nobody", "all", "the only one"])
def test_what_is_nobodys_fault_alone_is_raised(base, bad):
    """Then everything is as before the call."""
    own = failing.members()
    bank = bank_of(base, own)
    bank.forward_backward([("bob", rows_of("bob", own["bob"], 0))])
    before, passes = gradients(bank), 0

    def fail(_module: Any, args: Any, _output: Any) -> None:
        nonlocal passes
        passes += 1
        if not bad and len(args[0]) > failing.MOST_ROWS:
            raise ValueError("not this token")

    handle = bank._model.model.layers[1].register_forward_hook(fail)
    batches = [(name, rows_of(name, own[name], 1, bad=name in bad)) for name in own]
    with trouble(bank, "forward"), pytest.raises(ShardwiseError, match="^ValueError: not this token$"):
        bank.forward_backward(batches[:1] if bad == ("ada",) else batches)
    handle.remove()
    assert gradients(bank).keys() == before.keys()
    for name, values in gradients(bank).items():
        assert values.equal(before[name])
    assert passes == (5 if not bad else 0)
    bank.forward_backward(batches)
    assert all(bank.optim_step(name).is_taken for name in own)


def test_no_memory_for_all_at_once_is_said_so(base):
    own = failing.members()
    bank = bank_of(base, own)
    batches = [(name, rows_of(name, own[name], 0)) for name in own]
    match = "MemoryError: no more. There is memory for each of these tenants alone, and not for all at once: give"
    with trouble(bank, "memory"), pytest.raises(TrainingError, match=match):
        bank.forward_backward(batches)
    assert not any(values.any() for values in gradients(bank).values())
    with trouble(bank, "memory"):
        bank.forward_backward(batches[:2])
        bank.forward_backward(batches[2:])


def test_rows_that_do_not_fit_are_left_out(base):
    """The others are as if they had not been there."""
    own = failing.members()
    bank, quiet = bank_of(base, own), bank_of(base, own)
    batches = [(name, rows_of(name, own[name], 0)) for name in own]
    large = {key: values.repeat(5, 1) for key, values in dict(batches)["x"].items()}
    fitting = [(name, rows) for name, rows in batches if name in ("ada", "bob")]
    with trouble(bank, "memory"):
        told = bank.forward_backward([*fitting, ("x", large)])
    quiet.forward_backward([*fitting, ("x", banking.no_rows())])
    assert "'x', whose rows fail alone, too: MemoryError: no more" in str(told.failures["x"])
    for name in ("ada", "bob"):
        assert gradients(bank)[name].equal(gradients(quiet)[name])


def test_an_error_does_not_keep_what_was_computed(base):
    """There has to be memory to run tenants again, and whoever logs errors may keep them."""
    own = failing.members()
    bank = bank_of(base, own)
    computed: list[Any] = []
    handle = bank._model.model.embed_tokens.register_forward_hook(
        lambda _module, _args, output: computed.append(weakref.ref(output))
    )
    with trouble(bank, "forward"):
        told = bank.forward_backward([(name, rows_of(name, own[name], 0, bad=name == "x")) for name in own])
        with pytest.raises(ShardwiseError) as kept:
            bank.forward_backward([("x", rows_of("x", own["x"], 0, bad=True))])
    handle.remove()
    assert told.failures["x"].__cause__ is not None
    assert "not this token" in str(kept.value)
    assert len(computed) == 1 + len(own) + 1 + 1
    assert [values() for values in computed] == [None] * len(computed)


def test_ranks_that_are_on_different_ways_cannot_be_brought_into_step():
    first, second, other = (Gather(number, 4, torch.float32, is_of_all=True) for number in range(3))
    assert longest([[first], [first, second], []]) == [first, second]
    with pytest.raises(DisagreementError, match="rank 2 has gathered other groups .* The bank is over"):
        longest([[first], [first, second], [other]])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "groups"),
    [(2, "blocks"), (2, "every layer"), pytest.param(4, "some ranks gather", marks=pytest.mark.slow)],
)
def test_a_rank_that_fails_alone_holds_nobody_up(worlds, base, size, groups):
    """In the middle of a pass, while the others wait for it in a gather: they come out, and all go on."""
    ranks = worlds(size).run(failing.one_rank_fails, base, groups)
    why = f"rank {size - 1}: ValueError: not this token"
    for each in ranks:
        assert set(each["errors"].values()) == {f"CheckpointError: {why}"}
        assert len(each["failures"]) == 2
        both = {"forward: 1 gathers", "backward: 1 gathers"}
        # Of several others, one may hear of the failure before it comes to the gather that the rest are in.
        assert (
            each["waited for"] == both if each is ranks[-1] else each["waited for"] <= (both if size > 2 else set())
        )
        for own in each["failures"].values():
            assert own == {"x": f"'x', whose rows fail alone, too: {why}"}
        bank, quiet = each["states"]
        for name in OTHERS:
            require_equal(bank[name]["adapter"], quiet[name]["adapter"])
            moments = [state[name]["optimizer"]["state"][0] for state in (bank, quiet)]
            assert all(
                values.equal(moments[1][key])
                for key, values in moments[0].items()
                if isinstance(values, torch.Tensor)
            )
        assert each["goes on"] == (["x"], True)
        assert each["gathered"] == {"DTensor"}
