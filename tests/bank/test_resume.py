"""Resuming an adapter from files, in the middle of a window and on other numbers of ranks."""

import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.bank import banking, resuming
from tests.bank.banking import Recipe, matrices_of, recipes, train
from tests.bank.on_ranks import bank_of
from tests.bank.resuming import ALL, HALF, WINDOWS, everything, losses_of, members
from tests.support.files import contents, flip_bit
from tests.support.world import agreed
from tests.truth import require_equal
from torch.optim.lr_scheduler import ConstantLR, LinearLR, MultiStepLR, SequentialLR

import shardwise
import shardwise.saving.save
from shardwise.bank.adapter import AdapterStart
from shardwise.bank.training_facts import from_json, to_json
from shardwise.options import Ignore
from shardwise.saving.commit import commit_save
from shardwise.transfer import fingerprints
from shardwise.transfer.fingerprints import fingerprint

# ── arithmetic ────────────────────────────────────────────────────────────────────────────────────


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.sampled_from(["of", "is"]), inner, max_size=3)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


@given(_PLAIN)
def test_plain_data_comes_back_from_json(value):
    found = from_json(json.loads(json.dumps(to_json(value, "it"), allow_nan=False)), "it")
    assert found == value
    assert repr(found) == repr(value)


# ── on one rank ───────────────────────────────────────────────────────────────────────────────────


def set_rate_and_clip(adapter: Any) -> None:
    """Settings that are not those of the recipe."""
    adapter.optimizer.param_groups[0]["lr"], adapter.max_grad_norm = 0.02, 0.1


def test_it_continues_from_the_middle_of_a_window_to_the_bit(base, tmp_path):
    """In a bank of its own; and in the same one, while the others go on."""
    adapters = members()
    whole = bank_of(base, adapters)
    train(whole, adapters, HALF)
    rest = train(whole, adapters, ALL - HALF, first=HALF)

    bank = bank_of(base, adapters)
    train(bank, adapters, HALF - 1)
    set_rate_and_clip(bank._adapters["bob"])
    whole_bob = bank_of(base, {"bob": adapters["bob"]})
    train(whole_bob, {"bob": adapters["bob"]}, HALF - 1)
    set_rate_and_clip(whole_bob._adapters["bob"])
    train(whole_bob, {"bob": adapters["bob"]}, ALL - HALF + 1, first=HALF - 1)
    train(bank, adapters, 1, first=HALF - 1)
    before = {name: everything(bank, name) for name in adapters}
    for name in adapters:
        bank.save(name, tmp_path / name)
        require_equal(everything(bank, name), before[name])

    fresh = bank_of(base, {})
    for name, own in adapters.items():
        keywords: dict[str, Any] = {"schedule": own.schedule} if own.schedule else {}
        if name != "cy":  # whose optimizer is of the default class
            keywords |= {"optimizer": own.optimizer, "max_grad_norm": 9.0}
        told = fresh.load(name, tmp_path / name, **keywords)
        tokens = bank._adapters[name].num_supervised_tokens
        assert told == AdapterStart(2, 2, HALF % WINDOWS, tokens)
        assert tokens > 0
        require_equal(everything(fresh, name), before[name])
    again = train(fresh, adapters, ALL - HALF, first=HALF)

    bank.delete_adapter("cy")
    bank.load("cy", tmp_path / "cy", schedule=adapters["cy"].schedule)
    train(bank, adapters, ALL - HALF, first=HALF)
    for name in adapters:
        expected = everything(whole_bob if name == "bob" else whole, name)
        require_equal(everything(fresh, name), expected)
        require_equal(everything(bank, name), expected)
        if name != "bob":
            assert losses_of(again, name) == losses_of(rest, name)
    assert fresh._adapters["bob"].max_grad_norm == 0.1


def test_states_carry_an_open_window(base):
    adapters = members()
    whole = bank_of(base, adapters)
    train(whole, adapters, HALF)
    states = {name: whole.state_dict(name) for name in adapters}
    train(whole, adapters, ALL - HALF, first=HALF)
    other = bank_of(base, adapters)
    train(other, adapters, 1)  # what it has gathered itself goes
    for name in adapters:
        other.load_state_dict(name, states[name])
    train(other, adapters, ALL - HALF, first=HALF)
    for name in adapters:
        require_equal(everything(other, name), everything(whole, name))
    words = "its window is open, with gradient_accumulation_steps 3, and it is 1 here"
    with pytest.raises(shardwise.ConfigError, match=words):
        bank_of(base, {"ada": replace(adapters["ada"], gradient_accumulation_steps=1)}).load_state_dict(
            "ada", states["ada"]
        )


def half_way(base: Path, **changes: Any) -> tuple[Any, Any]:
    """One of the adapters, and the bank in which it has been trained."""
    adapters = {"ada": replace(members()["ada"], **changes)}
    bank = bank_of(base, adapters)
    train(bank, adapters, HALF)
    return adapters, bank


def test_matrices_that_are_served_in_16_bits_are_trained_in_32(base, tmp_path):
    _, bank = half_way(base)
    bank.save("ada", tmp_path, dtype="bfloat16")
    served = load_file(tmp_path / "adapter_model.safetensors")
    assert {own.dtype for own in served.values()} == {torch.bfloat16}
    fresh = bank_of(base, {})
    fresh.load("ada", tmp_path, schedule=banking.falling)
    require_equal(everything(fresh, "ada"), everything(bank, "ada"))


def test_without_a_training_it_begins_anew(base, tmp_path):
    _, bank = half_way(base)
    saved = bank.save("ada", tmp_path)
    assert saved.parameters == sum(values.numel() for values in matrices_of(bank, "ada").values())
    assert sorted(saved.files)[0] == "adapter_model.safetensors"
    only = bank_of(base, {})
    found = only.load("ada", tmp_path, training_state=False)
    assert found == AdapterStart(reason="the matrices alone were asked for")
    assert only.state_dict("ada")["facts"]["steps"] == 0
    assert list(saved.removed) == []
    training = next(name for name in saved.files if "training" in name)
    assert bank.save("ada", tmp_path, training_state=False).removed == (training,)
    assert "adapter_training" not in " ".join(path.name for path in tmp_path.iterdir())
    told = bank_of(base, {}).load("ada", tmp_path)
    assert not told.is_resumed
    assert "names no state of its training" in told.reason


def test_a_training_is_verified_with_its_adapter(base, tmp_path):
    adapters, bank = half_way(base)
    bank.save("ada", tmp_path, verify=True)
    report = shardwise.verify(tmp_path)
    assert (report.damaged, report.compared) == ((), report.tensors)
    assert report.tensors == len(adapters["ada"].config["target_modules"]) * 4 + 4  # step, two moments, a gradient
    flip_bit(next(tmp_path.glob("adapter_training.*")))
    assert len(shardwise.verify(tmp_path).damaged) == 1


# ── on other ranks ────────────────────────────────────────────────────────────────────────────────


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, own in expected.items():
        assert float((found[key] - own).norm()) <= 1e-6 * float(own.norm()) + 1e-9, key


@pytest.fixture(scope="module")
def begun(worlds: Any, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """By how many ranks began: the folder of what they saved half way, and what they come to."""

    @cache
    def begin(size: int) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("begun")
        return folder, on_ranks(worlds, size, resuming.begin, base, folder)

    return begin


def on_ranks(worlds: Any, size: int, function: Any, *given: Any) -> dict[str, Any]:
    """What all ranks come to, or one process."""
    if size == 1:
        return function(*given)
    found, *others = worlds(size).run(function, *given)
    for name in resuming.ON_RANKS:
        assert all(other["losses"] == found["losses"] for other in others)
        require_equal(others[-1]["all"][name], found["all"][name])
    return found


@pytest.mark.parametrize(("began", "ranks"), [(2, 1), (2, 2), (2, 3), (1, 2)])
def test_it_continues_on_any_number_of_ranks(worlds, base, begun, began, ranks):
    folder, expected = begun(began)
    found = on_ranks(worlds, ranks, resuming.go_on, base, folder)
    for name in resuming.ON_RANKS:
        require_equal(found["half"]["all"][name], expected["half"]["all"][name])
        start = found["started"][name]
        assert (start.steps, start.windows, start.micro_batches) == (2, 2, 1)
        near(found["all"][name], expected["all"][name])
        assert found["losses"][name] == pytest.approx(expected["losses"][name], rel=1e-6)


def test_ranks_that_pass_other_arguments_are_reported(worlds, base, tmp_path):
    first = agreed(worlds(2), resuming.differing, base, tmp_path)
    assert "on rank 1 is not that of rank 0: training_state (" in first["state"]
    assert first["name"].startswith("RankMismatchError: the name of the adapter on rank 1")
    assert first["given"].startswith("RankMismatchError: the state that 'ada' is given on rank 1")
    assert first["no mode"] == "ConfigError: rank 1: training_state='no': pass True or False"
    assert first["seed of one rank"].startswith(
        "RankMismatchError: the adapter 'x' (its config or options) on rank 1"
    )
    assert "and there is torch.optim.SGD now" in first["another optimizer"]
    assert first["names"] == ("ada", "eve")


# ── kills ─────────────────────────────────────────────────────────────────────────────────────────


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_save_that_fails_keeps_the_training_of_what_counts_or_is_aside(base, tmp_path, monkeypatch):
    adapters, bank = half_way(base)
    bank.save("ada", tmp_path)
    before = {name: own for name, own in contents(tmp_path).items() if name.startswith("adapter_")}
    (tmp_path / "adapter_training.00000000.safetensors").write_bytes(b"of a save that never counted")

    def fails(*_: Any) -> None:
        raise RuntimeError("in between")

    monkeypatch.setattr(shardwise.saving.save, "commit_save", fails)
    with pytest.raises(Exception, match="in between"):
        bank.save("ada", tmp_path)
    assert {name: own for name, own in contents(tmp_path).items() if name.startswith("adapter_")} == before
    weights, aside = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_model.0123abcd.older"
    weights.rename(aside)
    with pytest.raises(Exception, match="in between"):
        bank.save("ada", tmp_path)
    aside.rename(weights)

    def fails_later(*given: Any) -> None:
        commit_save(*given)
        raise RuntimeError("in between")

    monkeypatch.setattr(shardwise.saving.save, "commit_save", fails_later)
    train(bank, adapters, 1, first=HALF)
    with pytest.raises(Exception, match="in between"):
        bank.save("ada", tmp_path)
    weights = "adapter_model.safetensors"
    assert contents(tmp_path)[weights] != before[weights]
    assert bank_of(base, {}).load("ada", tmp_path, schedule=banking.falling).is_resumed


# ── what is refused ───────────────────────────────────────────────────────────────────────────────


def length_of(path: Path) -> int:
    found: int = struct.unpack("<Q", path.read_bytes()[:8])[0]
    return found


def header_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes()[8 : 8 + length_of(path)])
    return found


def rewrite(path: Path, header: dict[str, Any]) -> None:
    data = path.read_bytes()[8 + length_of(path) :]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    record_again(path.parent)


def record_again(folder: Path) -> None:
    """Have the record tell of the files as they are, as somebody does who has made them all."""
    record = folder / fingerprints.fingerprint_file("adapter_model")
    (older,) = fingerprints.parse(record.read_bytes())
    paths = [folder / name for name in older.files]
    tensors = {
        key: fingerprint(memoryview(path.read_bytes()[8 + length_of(path) :][slice(*entry["data_offsets"])]))
        for path in paths
        for key, entry in header_of(path).items()
        if key != "__metadata__"
    }
    config = (folder / "adapter_config.json").read_bytes()
    newer = fingerprints.RecordedSave(
        {path.name: path.stat().st_size for path in paths},
        tensors,
        {"adapter_config.json": fingerprints.digest(config)},
        {path.name: fingerprints.digest(path.read_bytes()[: 8 + length_of(path)]) for path in paths},
    )
    record.write_bytes(fingerprints.to_bytes([newer]))


def stepped(optimizer: Any) -> Any:
    return MultiStepLR(optimizer, [1, 3])


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("saved")
    _, bank = half_way(base, schedule=stepped)
    bank.save("ada", folder)
    return contents(folder)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optimizer": banking.sgd}, r"saved by torch.optim.AdamW, and there is torch.optim.SGD"),
    "another form": ({"optimizer": lambda own: torch.optim.AdamW(own, amsgrad=True)}, "saved with amsgrad=False"),
    "another schedule": ({"schedule": banking.falling}, r"its schedule was a .*MultiStepLR, and here .*LambdaLR"),
    "another seed": ({"seed": 5}, "seed 0, and 5 here"),
    "another window": (
        {"gradient_accumulation_steps": 2},
        "its window is open, with gradient_accumulation_steps 3, and it is 2 here",
    ),
}


@pytest.fixture(scope="module")
def bank(base: Path) -> Any:
    """A bank with an adapter, beside which calls of several tests are refused."""
    return bank_of(base, {"dee": recipes()["dee"]})


@pytest.mark.parametrize("what", REFUSED)
def test_differences_are_refused_by_name(bank, tmp_path, saved, what):
    put(tmp_path, saved)
    keywords, match = REFUSED[what]
    before = matrices_of(bank, "dee")
    with pytest.raises(shardwise.ConfigError, match=rf"(?s)adapter_training\.\w+\.safetensors.*{match}"):
        bank.load("x", tmp_path, **{"schedule": stepped, **keywords})
    assert bank.names == ("dee",)
    require_equal(matrices_of(bank, "dee"), before)
    assert bank.load("x", tmp_path, schedule=stepped).is_resumed
    bank.delete_adapter("x")


@pytest.mark.parametrize(
    ("found", "instead", "match"),
    [
        ('"r": 4', '"r": 8', r"q_proj.lora_A.weight: \(4, 32\) in the state, \(8, 32\) in the adapter"),
        ('"v_proj"', '"k_proj"', r"k_proj.lora_A.weight: not there in the state, \(4, 32\) in the adapter"),
        (
            '"lora_alpha": 8',
            '"lora_alpha": 4',
            r"q_proj: \(rank, scaling, dropout\) is \(4, 2.0, 0.2\) in the state",
        ),
    ],
    ids=["rank", "targets", "scaling"],
)
def test_a_config_of_another_is_refused_by_name(base, tmp_path, saved, found, instead, match):
    put(tmp_path, saved)
    config = tmp_path / "adapter_config.json"
    assert found in config.read_text()
    config.write_text(config.read_text().replace(found, instead))
    record_again(tmp_path)
    bank = bank_of(base, {})
    with pytest.raises(shardwise.ConfigError, match=rf"(?s)adapter_training\.\w+\.safetensors.*{match}"):
        bank.load("ada", tmp_path, schedule=stepped)
    assert bank.names == ()


def test_another_base_is_refused_by_name(base, tmp_path, saved):
    put(tmp_path, saved)
    banking.save_base(tmp_path / "untied", tied=False)
    with pytest.raises(shardwise.ConfigError, match=r"(?s)it was trained on /.*Qwen3ForCausalLM.*other names or"):
        bank_of(tmp_path / "untied", {}).load("ada", tmp_path, schedule=stepped)
    file = next(tmp_path.glob("adapter_training.*"))
    change(file, base={"name": "/somewhere/else"})  # a folder that was moved
    bank_of(base, {}).load("ada", tmp_path, schedule=stepped)


def test_a_base_whose_values_were_replaced_is_refused_unless_it_is_allowed(base, tmp_path, saved):
    put(tmp_path, saved)
    bank = bank_of(base, {})
    told = bank.load("same", tmp_path, schedule=stepped)
    assert told.base == "nothing differs; samples of 24 tensors compared"
    state = bank.state_dict("same")
    with torch.no_grad():
        bank._model.model.norm.weight.mul_(2)
    refused = (
        r"(?s)this is another base, .*values: of 24 tensors sampled, 1 differ: model\.norm\.weight\. Load the base"
    )
    with pytest.raises(shardwise.ConfigError, match=refused):
        bank.load("ada", tmp_path, schedule=stepped)
    with pytest.raises(shardwise.ConfigError, match=refused):
        bank.load_state_dict("same", state)
    with pytest.raises(shardwise.ConfigError, match="on_other_base"):
        bank.load("ada", tmp_path, schedule=stepped, on_other_base="ignore")
    assert bank.names == ("same",)
    told = bank.load("ada", tmp_path, schedule=stepped, on_other_base=Ignore())
    assert told.base.startswith("another, as allowed (of 24 tensors sampled, 1 differ")
    bank.load_state_dict("same", state, on_other_base=Ignore(only=("values",)))
    change(next(tmp_path.glob("adapter_training.*")), base={"identity": "{}"})
    with pytest.raises(shardwise.core.errors.FormatError, match="has no valid identity of the base model"):
        bank.load("forged", tmp_path, schedule=stepped)


def change(path: Path, **facts: Any) -> None:
    header = header_of(path)
    text = json.loads(header["__metadata__"]["shardwise.training"])
    for key, value in facts.items():
        text[key] = {**text[key], **value} if isinstance(value, dict) and isinstance(text.get(key), dict) else value
    header["__metadata__"]["shardwise.training"] = json.dumps(text)
    rewrite(path, header)


def reshape(path: Path) -> None:
    header = header_of(path)
    header["optimizer.exp_avg"]["shape"] = [2, header["optimizer.exp_avg"]["shape"][0] // 2]
    rewrite(path, header)


def rename(path: Path) -> None:
    header = header_of(path)
    header["optimizer.exp_avg_too"] = header.pop("optimizer.exp_avg")
    rewrite(path, header)


def without_text(path: Path) -> None:
    header = header_of(path)
    header["__metadata__"] = {"format": "pt"}
    rewrite(path, header)


def names(path: Path, what: str) -> None:
    weights = path.with_name("adapter_model.safetensors")
    header = header_of(weights)
    header["__metadata__"]["shardwise.training"] = what
    rewrite(weights, header)


HOSTILE: dict[str, tuple[Any, str]] = {
    "another key": (lambda path: change(path, more=1), "more: missing or unknown"),
    "no number": (lambda path: change(path, steps=float("nan")), "NaN is not JSON"),
    "a number as text": (lambda path: change(path, steps="2"), "'steps' expected int, got str"),
    "a count below 0": (lambda path: change(path, windows=-1), "counts contradict"),
    "too many micro-batches": (lambda path: change(path, micro_batches=4), "counts contradict"),
    "sizes that are none": (
        lambda path: change(path, matrices={"x": {"of": "tuple", "is": [{"of": "float", "is": "nan"}, 2]}}),
        "Invalid key or value in dict .matrices",
    ),
    "matrices of others": (
        lambda path: change(path, matrices={"x": {"of": "tuple", "is": [4, 2]}}),
        "x: .4, 2. in the state, not there",
    ),
    "another scaling": (lambda path: change(path, config={"x": {"of": "tuple", "is": [4, 2.0, 0]}}), "x: .rank,"),
    "a rate that is no number": (
        lambda path: change(path, settings={"lr": {"of": "float", "is": "nan"}}),
        "the setting lr of torch.optim.AdamW is nan",
    ),
    "a rate below 0": (lambda path: change(path, settings={"lr": -1.0}), "lr=-1.0 is not a valid value"),
    "a first rate below 0": (
        lambda path: change(path, settings={"initial_lr": -1.0}),
        "-1.0 is not a learning rate",
    ),
    "no rate": (lambda path: change(path, settings={"lr": None}), "lr=None is not a valid value"),
    "a setting that is text": (lambda path: change(path, settings={"initial_lr": "x"}), "the setting initial_lr"),
    "one setting more": (lambda path: change(path, settings={"swap": 1}), "the setting swap of torch.optim.AdamW"),
    "a method of the schedule": (
        lambda path: change(path, schedule_state={"step": 1}),
        r"its schedule .*it also has \['step'\]",
    ),
    "what means nothing": (lambda path: change(path, seed={"of": "object", "is": []}), "which means nothing"),
    "endless levels": (lambda path: change(path, seed=json.loads("[" * 60 + "]" * 60)), "more than 32 levels"),
    "no text": (without_text, "its header has no shardwise.training"),
    "a tensor of another shape": (reshape, r"optimizer.exp_avg: \(2, \d+\) F32 in the state, \(\d+,\) F32 here"),
    "a tensor of another name": (rename, "optimizer.exp_avg_too: .* in the state, not there here"),
    "a truncated file": (lambda path: path.write_bytes(path.read_bytes()[:-5]), "1 are missing"),
    "a way out of the folder": (
        lambda path: names(path, "../adapter_training.00000000.safetensors"),
        "not a valid name",
    ),
    "a file that is gone": (lambda path: names(path, "adapter_training.00000000.safetensors"), "Copy it there"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_files_of_strangers(bank, tmp_path, saved, what):
    put(tmp_path, saved)
    spoil, match = HOSTILE[what]
    spoil(next(tmp_path.glob("adapter_training.*")))
    with pytest.raises((shardwise.ConfigError, shardwise.CheckpointError), match=rf"(?s)adapter_.*{match}"):
        bank.load("ada", tmp_path, schedule=stepped)
    assert bank.names == ("dee",)
    if "JSON" not in match:
        assert not bank.load("ada", tmp_path, training_state=False).is_resumed
        bank.delete_adapter("ada")


def in_turn(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [ConstantLR(optimizer), LinearLR(optimizer)], [1])


def test_schedules_in_a_schedule(base, tmp_path):
    adapters, bank = half_way(base, schedule=in_turn)
    bank.save("ada", tmp_path)
    fresh = bank_of(base, {})
    fresh.load("ada", tmp_path, schedule=in_turn)
    for each in (bank, fresh):
        train(each, adapters, ALL - HALF, first=HALF)
    require_equal(everything(fresh, "ada"), everything(bank, "ada"))
    inner = bank._adapters["ada"].schedule.state_dict()["_schedulers"]
    schedule_state = {"_schedulers": [{**inner[0], "step": 1}, inner[1]]}
    change(next(tmp_path.glob("adapter_training.*")), schedule_state=schedule_state)
    with pytest.raises(shardwise.ConfigError, match="its _schedulers does not fit"):
        bank_of(base, {}).load("ada", tmp_path, schedule=in_turn)


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────


KINDS = [
    lambda own: torch.optim.NAdam(own, lr=1e-2),
    lambda own: torch.optim.RMSprop(own, lr=1e-3, centered=True, momentum=0.5),
    lambda own: torch.optim.ASGD(own, lr=1e-2),
    lambda own: torch.optim.Rprop(own, lr=1e-3),
    lambda own: torch.optim.AdamW(own, lr=torch.tensor(1e-2), amsgrad=True),
    lambda own: torch.optim.SGD(own, lr=1e-2),  # keeps nothing
]


def test_every_kind_of_optimizer_continues(base, tmp_path):
    adapters = {str(n): Recipe({"r": 2, "target_modules": ["q_proj"]}, kind) for n, kind in enumerate(KINDS)}
    bank = bank_of(base, adapters)
    train(bank, adapters, 2)
    fresh = bank_of(base, {})
    for name, own in adapters.items():
        bank.save(name, tmp_path / name)
        fresh.load(name, tmp_path / name, optimizer=own.optimizer)
    for each in (bank, fresh):
        train(each, adapters, 2, first=2)
    for name in adapters:
        require_equal(everything(fresh, name), everything(bank, name))
