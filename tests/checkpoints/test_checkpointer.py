"""Saved on some ranks, restored on others: the same bits, and the same training."""

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig
from tests import zoo
from tests.checkpoints import on_ranks, tiny
from tests.checkpoints.tiny import Training, differences
from tests.small_checkpoints import small_qwen3
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import lr_scheduler as schedules

import shardwise
from shardwise import Checkpointer, ConfigError, KeyMismatchError, ShardingError, StorageError, TrainState
from shardwise.checkpoints import write
from shardwise.checkpoints.header import HEADER, CheckpointHeader
from shardwise.checkpoints.step_folders import is_complete_folder, remove_incomplete_steps, steps_in
from shardwise.options import AdapterOnly, Ignore
from shardwise.transfer import distributed_chunks


def assert_goes_on(found, saved):
    """On every rank, bit for bit; the losses after it but for the order of sums."""
    for item in found:
        assert differences(item["state"], saved[0]["state"]) == []
        assert item["losses"] == pytest.approx(saved[0]["losses"], abs=1e-6)
        report = item["report"]
        assert report["missing"] == report["unexpected"] == report["mismatched"] == report["without_state"] == ()
        assert report["cast"] == {}
        assert report["user"] == {"best": 0.25, "tags": ["a"]}
        assert report["restored"] == ("model", "optimizers", "schedulers", "data", "rng")


def test_continues_on_fewer_ranks_and_then_on_more(worlds, tmp_path):
    saved = worlds(4).run(on_ranks.train_and_save, str(tmp_path), 3, "async", "flat", 4)
    found = worlds(2).run(on_ranks.restore_and_train, str(tmp_path), 2, "flat", 5)
    assert_goes_on(found, [{**saved[0], "losses": saved[0]["losses"][:2]}])
    later = worlds(3).run(on_ranks.restore_and_train, str(tmp_path), 2)
    assert_goes_on(later, [{"state": found[0]["after"], "losses": saved[0]["losses"][2:]}])


@pytest.mark.parametrize(("way", "size", "onto"), [("hsdp", 4, "flat"), ("flat", 4, "hsdp")])
def test_continues_on_another_mesh(worlds, tmp_path, way, size, onto):
    saved = worlds(size).run(on_ranks.train_and_save, str(tmp_path), 2, "sync", way, 1)
    assert_goes_on(worlds(4).run(on_ranks.restore_and_train, str(tmp_path), 1, onto), saved)


def test_a_training_in_ddp_goes_on_sharded(worlds, tmp_path):
    """Its names are those of the model inside, which `save` saves, and the one of an AveragedModel too."""
    assert worlds(2).run(on_ranks.out_of_ddp, tmp_path) == [([], [], [])] * 2
    assert all((tmp_path / name / "config.json").exists() for name in ("saved", "averaged"))


@pytest.mark.parametrize(("size", "then"), [(1, 3), (3, 1)])
def test_one_process_is_a_world_too(worlds, tmp_path, size, then):
    def run(count, *args):
        return [args[0](*args[1:])] if count == 1 else worlds(count).run(*args)

    saved = run(size, on_ranks.train_and_save, str(tmp_path), 2, "async", "flat", 1)
    assert_goes_on(run(then, on_ranks.restore_and_train, str(tmp_path), 1), saved)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_optimizers_of_several_kinds(tmp_path, make, settings):
    saved = [on_ranks.train_and_save(str(tmp_path), 2, "sync", "flat", 1, make=make, **settings)]
    found = [on_ranks.restore_and_train(str(tmp_path), 1, make=make, **settings)]
    assert differences(found[0]["state"], saved[0]["state"]) == []
    assert found[0]["losses"] == saved[0]["losses"]


@pytest.mark.parametrize("fused", [False, True])
def test_state_that_an_optimizer_made_on_meta_is_allocated(tmp_path, fused):
    def made(device):
        model = nn.Linear(3, 2, device=device)
        return TrainState(model, torch.optim.Adagrad(model.parameters(), fused=fused))

    saved, restored = made("cpu"), made("meta")
    saved.model(torch.ones(1, 3)).sum().backward()
    saved.optimizers.step()
    Checkpointer(tmp_path).save(1, saved)
    Checkpointer(tmp_path).restore(restored)
    assert differences(restored.optimizers.state_dict(), saved.optimizers.state_dict()) == []


class Plateau(schedules.ReduceLROnPlateau):
    """Of a loss that never gets better."""

    def step(self, metrics=1.0, epoch=None):
        super().step(metrics, epoch)


class Falling:
    """A factor with a state, which torch keeps."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, step):
        return self.factor / (1 + step)


def sequential(optimizer):
    first = schedules.LinearLR(optimizer, 0.1, total_iters=2)
    return schedules.SequentialLR(optimizer, [first, schedules.CosineAnnealingLR(optimizer, 5)], [2])


def chained(optimizer):
    constant = schedules.ConstantLR(optimizer, total_iters=3)
    return schedules.ChainedScheduler([constant, schedules.ExponentialLR(optimizer, 0.9)], optimizer)


def cyclic(optimizer, **keywords):
    return schedules.CyclicLR(optimizer, 0.01, 0.3, 3, cycle_momentum=False, **keywords)


SCHEDULES = {
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, [Falling(2.0), Falling(3.0)]),
    "functions": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplicative": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.9),
    "milestones": lambda optimizer: schedules.MultiStepLR(optimizer, [2, 2, 5]),
    "sequential": sequential,
    "chained": chained,
    "plateau": Plateau,
    "cyclic": cyclic,
    "own cycle": lambda optimizer: cyclic(optimizer, scale_fn=Falling(0.5)),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, total_steps=9, cycle_momentum=False),
    "warm restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 3),
    "polynomial": lambda optimizer: schedules.PolynomialLR(optimizer, 8, 2.0),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_of_several_kinds(tmp_path, kind):
    make = SCHEDULES[kind]
    one, two = Training(), Training(seed=1)
    one.schedule, two.schedule = (make(item.optimizer) for item in (one, two))
    one.step(2)
    Checkpointer(tmp_path).save(2, one.state)
    Checkpointer(tmp_path).restore(two.state)
    for _ in range(4):
        one.step()
        two.step()
        assert one.schedule.get_last_lr() == two.schedule.get_last_lr()
        assert one.losses[-1] == two.losses[-1]


def test_what_is_written_is_the_state_at_the_call(worlds, tmp_path):
    """The training goes on before the first byte is written, and the files are those of a synchronous save."""
    ranks = worlds(3)
    found = ranks.run(on_ranks.train_while_it_is_written, str(tmp_path / "async"), 2)
    assert [is_early for _, is_early in found] == [False] * 3
    ranks.run(on_ranks.train_and_save, str(tmp_path / "sync"), 2)
    files = sorted(path.name for path in (tmp_path / "sync" / "step-2").iterdir())
    assert len(files) == 5
    for name in files:
        one, other = ((tmp_path / mode / "step-2" / name).read_bytes() for mode in ("sync", "async"))
        assert one == other, name


def test_the_memory_for_staging_is_used_again(worlds, tmp_path):
    assert all(first == second for first, second in worlds(2).run(on_ranks.save_twice, str(tmp_path)))


def test_saves_of_inference_mode_and_others_take_turns(tmp_path):
    training = Training()
    with Checkpointer(tmp_path, mode="async") as checkpointer:
        with torch.inference_mode():
            checkpointer.save(1, training.state)
        checkpointer.save(2, training.state)
    assert checkpointer.steps() == [1, 2]


def test_a_closed_checkpointer_keeps_nothing_of_the_state(tmp_path):
    training = Training()
    checkpointer = Checkpointer(tmp_path, mode="async")
    checkpointer.save(1, training.state)
    references = [weakref.ref(training.model.narrow.weight), weakref.ref(checkpointer._staging._slabs[0])]
    checkpointer.close()
    del training
    gc.collect()
    assert [item() for item in references] == [None, None]
    checkpointer.save(2, Training().state)
    checkpointer.close()
    assert checkpointer.latest() == 2


IN_PROGRESS_AT_THE_END = """
import concurrent.futures.thread as executors
import time
from shardwise import Checkpointer
from shardwise.checkpoints import write
from tests.checkpoints.tiny import Training

def late(*args, original=write.write_and_commit):
    while not executors._shutdown:
        time.sleep(0.01)
    return original(*args)

write.write_and_commit = late
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "Checkpointer({!r}, mode='async').save(1, Training().state)",
        "with Checkpointer({!r}, mode='async') as saving:\n  saving.save(1, Training().state)\n  raise ValueError",
    ],
)
def test_a_checkpoint_in_progress_is_completed_when_the_script_ends(tmp_path, script):
    text = IN_PROGRESS_AT_THE_END + script.format(str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ended.returncode == ("raise" in script), ended.stderr
    assert Checkpointer(tmp_path).latest() == 1, ended.stderr


def test_replicas_share_the_work(worlds, tmp_path):
    worlds(4).run(on_ranks.train_and_save, str(tmp_path), 1, "sync", "hsdp")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "step-1").glob("*.distcp"))]
    assert len(sizes) == 4
    assert min(sizes) > 0.3 * max(sizes)


def test_torch_reads_it(worlds, tmp_path):
    """By its converter to one file."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved = worlds(3).run(on_ranks.train_and_save, str(tmp_path), 2)[0]["state"]
    with zoo.silenced():  # that there is no process group
        dcp_to_torch_save(tmp_path / "step-2", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert differences(whole["model"], saved["model"]) == []
    assert differences(whole["optimizer"]["state"], saved["moments"]) == []
    assert whole["optimizer"]["param_groups"] == saved["groups"]
    assert whole["data"]["rank_0"] == {"at": 2}


def test_torch_resumes_from_it_with_tied_weights(worlds, tmp_path):
    """Both names of a tied tensor are there for it, and its bytes once."""
    saved = worlds(2).run(on_ranks.train_and_save, str(tmp_path), 2)[0]["state"]
    for state in worlds(2).run(on_ranks.resume_with_torch, str(tmp_path / "step-2")):
        assert differences(state["model"], saved["model"]) == []
        assert differences(state["moments"], saved["moments"]) == []
        assert state["groups"] == saved["groups"]
    step = tmp_path / "step-2"
    metadata = pickle.loads((step / ".metadata").read_bytes())
    chunks = {(info.relative_path, info.offset): info.length for info in metadata.storage_data.values()}
    assert sum(chunks.values()) <= sum(path.stat().st_size for path in step.glob("*.distcp"))
    assert {"model.embed.weight", "model.head.weight"} <= metadata.state_dict_metadata.keys()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_torch_reads_the_settings_of_an_optimizer(tmp_path, kind):
    """Of one without state, and of one whose learning rate is a tensor."""

    def trained(lr):
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=torch.tensor(lr) if kind is torch.optim.Adam else lr)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(0.5)
    Checkpointer(tmp_path).save(1, TrainState(model, optimizer))
    state = dict(zip(("model", "optimizer"), get_state_dict(*trained(0.25)), strict=True))
    with zoo.silenced():  # that there is no process group
        dcp.load(state, checkpoint_id=tmp_path / "step-1")
    assert torch.equal(state["model"]["weight"], model.weight)
    saved = get_state_dict(model, optimizer)[1]
    assert state["optimizer"]["param_groups"] == saved["param_groups"]
    other = trained(0.25)
    Checkpointer(tmp_path).restore(TrainState(*other))
    assert get_state_dict(*other)[1]["param_groups"] == saved["param_groups"]


def test_two_models_are_one_module_dict(worlds, tmp_path):
    assert worlds(2).run(on_ranks.restore_two_models, str(tmp_path)) == [[], []]
    with pytest.raises(ConfigError, match=r"model is a list\. .* several in a torch\.nn\.ModuleDict"):
        TrainState([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_our_loader_reads_the_model_in_it(worlds, tmp_path):
    saved = worlds(2).run(on_ranks.train_and_save, str(tmp_path), 1)[0]["state"]
    model = tiny.Tiny()
    shardwise.load(model, tmp_path / "step-1", buffers={"table": lambda module: torch.arange(6.0)})
    assert differences(dict(model.state_dict()), saved["model"]) == []


# Random numbers and data


def test_random_numbers_continue(worlds, tmp_path):
    ranks = worlds(3)
    found = ranks.run(on_ranks.random_numbers, str(tmp_path), "save")
    assert found == ranks.run(on_ranks.random_numbers, str(tmp_path), "restore")


def test_random_numbers_on_other_ranks(worlds, tmp_path):
    """What was alike stays alike and goes on; the rest is another on every rank, and the same every time."""
    saved = worlds(3).run(on_ranks.random_numbers, str(tmp_path), "save")
    found = worlds(4).run(on_ranks.random_numbers, str(tmp_path), "restore")
    assert found == worlds(4).run(on_ranks.random_numbers, str(tmp_path), "restore")
    assert [[draw[2] for draw in item] for item in found] == [[draw[2] for draw in saved[0]]] * 4
    for generator in (0, 1):
        numbers = {item[0][generator] for item in found}
        assert len(numbers) == 4
        assert numbers.isdisjoint({item[0][generator] for item in saved})


def test_positions_of_each_rank(worlds, tmp_path):
    warnings = worlds(3).run(on_ranks.save_own_positions, str(tmp_path))
    assert [text[:82] for text in warnings[0]] == [
        "The schedulers or the scaler on rank 2 are not in the state of those on rank 0, wh"
    ]
    assert warnings[1:] == [[], []]
    found = worlds(3).run(on_ranks.restore_own_positions, str(tmp_path))
    assert [at for _, at, _ in found] == [10, 11, 12]
    assert {error for error, _, _ in found} == {("", "")}
    for (kind, text), at, report in worlds(2).run(on_ranks.restore_own_positions, str(tmp_path)):
        assert kind == "KeyMismatchError"
        assert "data: a position for each of 3 ranks, and now there are 2" in text
        assert at == 0
        assert report["mismatched"] == ("data",)
        assert "data" not in report["restored"]


# Which checkpoints there are


@pytest.mark.parametrize("keep", [0, 3])
def test_keeps_the_newest(worlds, tmp_path, keep):
    for found in worlds(2).run(on_ranks.keep_last, str(tmp_path), keep):
        steps = [2, 5, 10, 11]
        for number, (there, removed) in enumerate(found, start=1):
            assert there == (steps[:number][-keep:] if keep else steps[:number])
            assert removed == (tuple(steps[: number - keep][-1:]) if keep and number > keep else ())
    assert not (tmp_path / "shardwise.saving").exists()


def test_latest_sees_complete_checkpoints_alone(tmp_path):
    training = Training()
    checkpointer = Checkpointer(tmp_path / "run")
    assert checkpointer.latest() is None
    checkpointer.save(3, training.state)
    run = tmp_path / "run"
    (run / "step-9").mkdir()
    (run / "step-9" / "__0_0.distcp").write_bytes(b"half")
    (run / "step-9" / "shardwise.checkpoint.json").write_text("{}")
    Checkpointer(tmp_path / "elsewhere").save(8, training.state)
    elsewhere = tmp_path / "elsewhere" / "step-8"
    (run / "step-10").symlink_to(elsewhere)
    shutil.copytree(elsewhere, run / "step-8", copy_function=os.symlink)
    for name in ("step-012", "step-1e3", "step--4", "step-13.old", "Step-14", "step-٣", f"step-{10**20}"):
        shutil.copytree(run / "step-3", run / name)
    (run / "step-15").write_text("a file")
    assert checkpointer.steps() == [3, 8]
    assert checkpointer.latest() == 8
    assert checkpointer.restore(training.state).step == 8
    assert checkpointer.discard_after(3) == [8]
    assert checkpointer.steps() == [3]
    assert is_complete_folder(elsewhere), "of links to it, the links are removed"


def test_metadata_that_no_reader_accepts_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    training = Training()
    Checkpointer(tmp_path, keep=1).save(1, training.state)
    checkpointer = Checkpointer(tmp_path, keep=1)
    monkeypatch.setattr(distributed_chunks, "MAX_METADATA_BYTES", 1000)
    monkeypatch.setattr(write, "_write_local", None)
    with pytest.raises(ShardingError, match=r"\.metadata: would have \d+ bytes .* Save from fewer ranks"):
        checkpointer.save(2, training.state)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert checkpointer.restore(training.state).step == 1


def test_leftovers_are_removed_by_the_next_save_and_nothing_else_is(tmp_path):
    training = Training()
    for name in ("__0_0.distcp", "__12_0.distcp", "shardwise.checkpoint.json", "..metadata.0a1b2c3d.incomplete"):
        (tmp_path / "step-4").mkdir(exist_ok=True)
        (tmp_path / "step-4" / name).write_bytes(b"half")
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-5" / "notes.txt").write_text("mine")
    (tmp_path / "step-6").mkdir()
    (tmp_path / "step-6" / ".metadata").write_bytes(b"of another tool")
    (tmp_path / "config.yaml").write_text("mine")
    Checkpointer(tmp_path).save(7, training.state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "step-5", "step-6", "step-7"]
    assert [path.name for path in (tmp_path / "step-5").iterdir()] == ["notes.txt"]
    assert (tmp_path / "step-6" / ".metadata").read_bytes() == b"of another tool"


def test_a_folder_that_is_another_owner_s_is_not_written_to(tmp_path):
    training = Training()
    (tmp_path / "step-6").mkdir()
    (tmp_path / "step-6" / ".metadata").write_bytes(b"of another tool")

    with pytest.raises(shardwise.StorageError, match=r"step-6: holds .metadata, which no Checkpointer put there"):
        Checkpointer(tmp_path).save(6, training.state)
    with pytest.raises(shardwise.StorageError, match=r"no complete checkpoint of step 6. There is none"):
        Checkpointer(tmp_path).restore(training.state, 6)
    with pytest.raises(shardwise.StorageError, match=r"no complete checkpoint. Start"):
        Checkpointer(tmp_path).restore(training.state, None)
    Checkpointer(tmp_path).save(7, training.state)


def test_a_second_run_is_reported(tmp_path):
    one, two = Checkpointer(tmp_path), Checkpointer(tmp_path)
    training = Training()
    one.save(1, training.state)
    with pytest.raises(shardwise.StorageError, match="another run has saved step 1 there since this one began"):
        two.save(2, training.state)
    assert one.steps() == [1]


def test_going_back_takes_a_decision(tmp_path):
    training = Training()
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, training.state)
    assert checkpointer.restore(training.state, 1).step == 1
    with pytest.raises(shardwise.StorageError, match=r"step 2 is not after 3.*discard_after\(1\)"):
        checkpointer.save(2, training.state)
    assert checkpointer.discard_after(1) == [2, 3]
    checkpointer.save(2, training.state)
    assert checkpointer.steps() == [1, 2]


# Without the base


def test_an_adapter_is_stored_without_its_base(worlds, tmp_path):
    saved = worlds(2).run(on_ranks.save_adapter, str(tmp_path))
    whole = Path(tmp_path, "step-1", ".metadata").read_bytes()
    assert b"lora_A" in whole
    assert b"embed_tokens" not in whole
    for found in worlds(3).run(on_ranks.restore_adapter, str(tmp_path), "same"):
        assert found["losses"] == pytest.approx(saved[0]["losses"], abs=1e-6)
        assert all("lora_" in name for name in found["report"]["model"])
        assert any("embed_tokens" in name for name in found["report"]["not_stored"])
        assert "tensors are not in it, on purpose: those of the base" in found["text"]


OTHER_TUNINGS = {
    "full": "holds adapter default, and this run checkpoints everything",
    "rank": "an adapter of another config: r was 4, is 8",
    "alpha": "lora_alpha was 8, is 32",
    "base": "belongs to another base model",
}


@pytest.mark.parametrize("how", OTHER_TUNINGS)
def test_another_tuning_is_refused(worlds, tmp_path_factory, how, adapter_run):
    for kind, text in worlds(2).run(on_ranks.restore_adapter, adapter_run, how):
        assert kind == "KeyMismatchError"
        assert OTHER_TUNINGS[how] in text


def test_another_alpha_is_refused_where_the_base_is_stored_too(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, TrainState(on_ranks.lora(1)))
    checkpointer.restore(TrainState(on_ranks.lora(2)))
    with pytest.raises(KeyMismatchError, match=r"another config: default\.lora_alpha was 8, is 32"):
        checkpointer.restore(TrainState(on_ranks.lora(2, lora_alpha=32)))
    checkpointer.restore(TrainState(on_ranks.lora(2, lora_dropout=0.5)))


@pytest.mark.parametrize("only", [None, AdapterOnly()])
def test_settings_of_an_adapter_that_one_side_has_are_not_compared(tmp_path, only):
    """Those that another release of PEFT does not have."""
    checkpointer = Checkpointer(tmp_path, only=only)
    checkpointer.save(1, TrainState(on_ranks.lora(1)))
    file = tmp_path / "step-1" / HEADER
    header = CheckpointHeader.from_bytes(file.read_bytes(), HEADER)
    prefix = "" if only else "default."
    settings = {name: value for name, value in header.adapter.items() if name != f"{prefix}lora_bias"}
    settings[f"{prefix}of_another_release"] = None
    file.write_bytes(replace(header, adapter=settings).to_bytes())
    checkpointer.restore(TrainState(on_ranks.lora(2)))


def test_another_adapter_on_one_side_is_left_to_the_consents(tmp_path):
    one, two = on_ranks.lora(1), on_ranks.lora(1)
    with zoo.silenced():
        two.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj"]))
    second = Ignore(("*.second.*",))
    for saved, restored, consent in ((one, two, {"on_missing": second}), (two, one, {"on_unexpected": second})):
        checkpointer = Checkpointer(tmp_path / next(iter(consent)))
        checkpointer.save(1, TrainState(saved))
        with pytest.raises(KeyMismatchError, match="does not fit"):
            checkpointer.restore(TrainState(restored))
        checkpointer.restore(TrainState(restored), **consent)


@pytest.fixture(scope="module")
def adapter_run(worlds, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("adapter"))
    worlds(2).run(on_ranks.save_adapter, folder)
    return folder


def test_a_resumed_model_reads_nothing_of_the_base(worlds, tmp_path):
    base, run = zoo.save_original(small_qwen3(tie_word_embeddings=True), tmp_path / "base"), tmp_path / "run"
    losses = worlds(2).run(on_ranks.save_pretrained_run, str(base), str(run))
    with (base / "model.safetensors").open("r+b") as file:  # the header stays, and every weight is NaN
        header = 8 + int.from_bytes(file.read(8), "little")
        nbytes = file.seek(0, 2)
        file.seek(header)
        file.write(b"\xff" * (nbytes - header))
    for is_hollow, found, report in worlds(3).run(on_ranks.resume_pretrained_run, str(base), str(run)):
        assert is_hollow
        assert found == pytest.approx(losses[0], abs=1e-6)
        assert report["read_bytes"] > 0


def test_state_alone_is_enough(tmp_path):
    """A model without an optimizer, and no more."""
    model = tiny.Tiny()
    Checkpointer(tmp_path).save(0, TrainState(model))
    other = tiny.Tiny()
    report = Checkpointer(tmp_path).restore(TrainState(other))
    assert report.restored == ("model", "rng")
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []


def test_state_that_the_optimizer_makes_between_two_checkpoints_is_stored(worlds, tmp_path):
    """The plan of the first is not reused for the second, but that of the second for the third.

    It is made again for the fourth, because one rank has its optimizer state elsewhere.
    """
    counts, differing = worlds(2).run(on_ranks.save_before_and_after_a_step, str(tmp_path))[0]
    assert counts[0] < counts[1] == counts[2] == counts[3]
    assert differing == []


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("replaced", ["memory", "_buffers", "_parameters", "_modules"])
def test_values_in_other_memory_after_the_first_checkpoint_are_stored(tmp_path, mode, replaced):
    """Also if a module has other registries, of which nothing tells the modules around it."""
    model = tiny.Tiny()
    model.register_buffer("pairs", torch.eye(3).to_sparse(), persistent=False)
    before = copy.deepcopy(model.state_dict())
    with Checkpointer(tmp_path, mode=mode) as checkpointer:
        checkpointer.save(0, TrainState(model))
        if replaced == "memory":
            model.narrow.weight.data = model.narrow.weight.data.clone() + 1
        elif replaced == "_modules":
            model._modules = {**model._modules, "narrow": torch.nn.Linear(6, 1)}
        elif replaced == "_parameters":
            model._parameters = {"scale": torch.nn.Parameter(torch.full((1,), 2.0))}
        else:
            model._buffers = {**model._buffers, "seen": torch.ones(3)}
        checkpointer.save(1, TrainState(model))
    other = tiny.Tiny()
    Checkpointer(tmp_path).restore(TrainState(other))
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    assert differences(dict(other.state_dict()), before) != []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_and_optimizer_state_of_no_parameter(tmp_path):
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["count"] = 0
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, TrainState(model, optimizer))
        model[0].weight.data = torch.full((2, 2), float(step))
    checkpointer.restore(TrainState(model, optimizer))
    assert model[0].weight.eq(1).all()


def test_shards_in_other_memory_after_the_first_checkpoint_are_stored(worlds, tmp_path):
    """As after an offload to the host and back."""
    assert worlds(2).run(on_ranks.save_moved_shards, str(tmp_path)) == [[], []]


@pytest.fixture
def folder_for_all():
    """Another user may enter it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def closed(folder, mode=0o000):
    """As that of another user."""
    user = os.geteuid()
    folder.chmod(mode)
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_step_that_may_not_be_entered_is_left_alone(folder_for_all):
    """Those of another user, beside one's own."""
    folder = folder_for_all
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, TrainState(tiny.Tiny()))
    shutil.copytree(folder / "step-2", folder / "step-1")
    with closed(folder / "step-1"):
        assert Checkpointer(folder).latest() == 2
        assert steps_in(folder) == [2]
        with pytest.raises(StorageError, match="step-1"):
            remove_incomplete_steps(folder)
    assert steps_in(folder) == [1, 2]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_old_step_that_may_not_be_removed_stays(folder_for_all, caplog, mode):
    folder, state = folder_for_all, TrainState(tiny.Tiny())
    folder.chmod(0o777)
    with Checkpointer(folder, keep=1, mode=mode) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        with closed(folder / "step-1", 0o555):
            for step in (2, 3):
                checkpointer.save(step, state)
                checkpointer.wait()
        assert checkpointer.steps() == [1, 3]
        assert "Step 3 is complete: remove step 1 yourself" in caplog.text
        assert checkpointer.save(4, state).step == 4
    assert steps_in(folder) == [4]


def test_a_newest_step_that_may_not_be_entered_is_named(folder_for_all):
    """It may be complete."""
    folder, state = folder_for_all, TrainState(tiny.Tiny())
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, state)
        with closed(folder / "step-2"):
            for step in (None, 2):
                with pytest.raises(
                    StorageError, match=r"step 2 may not be entered\. Change the permissions of its"
                ):
                    checkpointer.restore(state, step=step)
    shutil.copytree(folder / "step-2", folder / "step-3")
    with closed(folder / "step-3"), Checkpointer(folder) as checkpointer:
        report = checkpointer.restore(state)
        assert (report.step, report.skipped_steps) == (2, (3,))
