"""Trainings that cannot work are refused by name, on all ranks, before anything is built."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from tests.integrations.requirements import require_patched_names
from tests.integrations.runs import write
from tests.support.crashes import EffectLog, recorded, states_after_crash
from tests.support.local_ranks import LocalRanks
from tests.support.world import agreed, require_words
from tests.truth import require_equal
from torch import nn
from torch.optim import SGD
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerControl, TrainingArguments
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils.hub import PushInProgress

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.ranks.world import World

require_patched_names()
from tests.integrations import refusing  # noqa: E402

from shardwise.integrations import ShardwiseTrainer, for_trainer, trainer_checkpoints  # noqa: E402
from shardwise.integrations.agreed_events import AgreedEvents  # noqa: E402
from shardwise.integrations.trainer_rows import describe_order, describe_rows  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = write(tmp_path_factory.mktemp("models"))
    config = Qwen3Config.from_pretrained(place / "causal")
    config.tie_word_embeddings = False
    Qwen3ForCausalLM(config).save_pretrained(place / "untied")
    return place


@pytest.fixture
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, is_forked=True) as ranks:
        yield ranks


@pytest.mark.distributed
def test_models(two: LocalRanks, folder: Path) -> None:
    found = agreed(two, refusing.models, str(folder))
    assert found.pop("by others") == "", "what fully_shard alone has sharded is trained as well"
    expected = {
        "not sharded": "ConfigError: for_trainer(Qwen3ForCausalLM): is not sharded",
        "compiled": "ConfigError: for_trainer: the model is inside of OptimizedModule. Pass the model itself",
        "on meta": "ShardingError: ",
        "a name": "ConfigError: for_trainer(str): is not a model of transformers",
        "not a model of transformers": "ConfigError: for_trainer(Linear): is not a model of transformers",
        "several meshes": "ConfigError: for_trainer(FSDPQwen3ForCausalLM): its parameters are on several meshes",
        "tensor parallel": "FSDP2 averages over fewer than the 2 ranks that get rows of their own",
        "by transformers": "ConfigError: for_trainer(FSDPQwen3ForCausalLM): transformers has sharded it",
    }
    require_words(found, expected)


@pytest.mark.distributed
def test_a_marked_model_is_saved_here(two: LocalRanks, folder: Path, tmp_path: Path) -> None:
    """Not by PEFT, whose copies of modules would be stale."""
    found = agreed(two, refusing.marked, str(folder), str(tmp_path / "saved"))
    assert found["same"]
    assert found["opened"]
    assert found["tensor parallel"] is None, "PEFT takes 1 for tensor parallelism"
    assert "save_pretrained: the model is sharded. Call shardwise.save(" in found["refused before"]
    assert "resize_token_embeddings: the model is sharded. Pass resize_vocab=" in found["resized"]
    assert (tmp_path / "saved" / "gathered0").is_dir(), "transformers saves on the first rank"
    assert "save_pretrained(push_to_hub)" in found["refused"]
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    expected = load_file(folder / "adapter" / "adapter_model.safetensors")
    require_equal(saved, expected)


@pytest.mark.distributed
def test_trainers(two: LocalRanks, folder: Path, tmp_path: Path) -> None:
    found = agreed(two, refusing.trainers, str(folder), str(tmp_path))
    assert found.pop("asked for") == "False"
    assert found.pop("adamw_torch") == found.pop("afterwards") == found.pop("shards") == ""
    expected = {
        "alone": "accelerate counts 1 processes, and the model's process group has 2 ranks",
        "no model": "Mine(model='gpt2'): ShardwiseTrainer trains a loaded model",
        "not for it": "pass model=for_trainer(model)",
        "group afterwards": "Mine(Qwen3ForCausalLM): is not sharded, and 2 ranks train it together",
        "model_init": "ShardwiseTrainer trains a loaded model",
        "peft_config": "Load the model with from_pretrained(tuning=Lora(config)) instead",
        "fsdp of accelerate": "would have the Trainer shard a model that is sharded already",
        "uneven": "Mine: accelerator_config has even_batches=False, so that a rank with fewer batches",
        "split": "split_batches=True, so that per_device_train_batch_size would be the rows of all ranks",
        "rows of a rank": "Mine(cp_size=2) with train_sampling_strategy='batch_rebalance'",
        "gathered": "is not the model's. Create the optimizer from model.parameters(), and do not replace",
        "upload": "StorageError: rank 0: push_to_hub: failed, OSError: no space. Upload the folder",
        "tracker": "WANDB_LOG_MODEL: the tracker would save the model on the first rank alone. Unset it",
        "jit": "Mine: enable_jit_checkpoint saves on the rank that gets a signal alone. Leave it out",
        "tensor parallel": "parallelism_config has tp_size=2, and the Trainer supports a model",
        "other shards": "parallelism_config is for 4 ranks, and there are 2",
        "other ranks": "parallelism_config is for 4 ranks, and there are 2",
        "smoothing": "Mine(cp_size=2) with label_smoothing_factor=0.1: it would compute from this rank's part",
        "evaluation": "Mine(cp_size=2) with eval_strategy='epoch'",
        "sequences of accelerate": "accelerate's configuration has cp_size. Pass TrainingArguments",
        "classes": "Mine(cp_size=2) with a model that is not a causal language model: it would compute",
        "own loss": "Mine(cp_size=2) with compute_loss_func: it would compute",
        "evaluate": "evaluate, predict: with cp_size=2 each rank would evaluate a part of each sequence",
        "eager": "with attn_implementation='eager': under context parallelism every rank",
        "fsdp": "would have the Trainer shard a model that is sharded already",
        "adafactor": "transformers' Adafactor: steps whole tensors, not shards. Use torchao's AdamW8bit",
        "home": f"resume_from_checkpoint='{tmp_path}/gone': no such folder",
        "other folder": "resume_from_checkpoint, or output_dir, on rank 1 is not that of rank 0",
    }
    require_words(found, expected)
    assert not any(tmp_path.iterdir()), "nothing was written"


def test_one_process_trains_on_one_device(folder: Path, tmp_path: Path) -> None:
    kind: Any = type("Mine", (ShardwiseTrainer, Trainer), {})
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    args._n_gpu = 2
    model = for_trainer(Qwen3ForCausalLM.from_pretrained(folder / "causal"))
    with pytest.raises(ConfigError, match=r"Mine: this process has 2 devices .* Start it by torchrun"):
        kind(model=model, args=args)


@pytest.mark.distributed
def test_trainers_of_trl(two: LocalRanks, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    found = agreed(two, refusing.of_trl, str(folder), str(tmp_path))
    expected = {
        "no reference": "compares with a reference model, which TRL would load whole on every rank. Pass ref",
        "reference": "(ref_model=...): pass ref_model=for_trainer(reference)",
        "precompute": "TRL would hash the model's weights",
        "grpo": "compares with a reference model, which TRL would load whole on every rank. "
        "Pass ref_model=for_trainer",
        "rloo": "compares with a reference model, which TRL would load whole on every rank. "
        "Pass ref_model=for_trainer",
        "head apart": "TRL reads the weight of the model's head without calling it",
        "sequences": "Mine(cp_size=2) with a trainer of TRL: it would compute from this rank's part",
    }
    require_words(found, expected)


def test_one_process_needs_no_sharding(tmp_path: Path) -> None:
    from tests.training import tiny

    model = tiny.model()
    assert for_trainer(model) is model
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("complete", "limit", "best", "removed"),
    [
        ([2, 4, 6], None, None, []),
        ([2, 4, 6], 2, None, [2]),
        ([2, 4, 6], 1, None, [2, 4]),
        ([2, 4, 6], 1, 2, [4]),
        ([], 1, None, []),
        ([2, 4], 1, 9, [2]),
    ],
)
def test_which_checkpoints_go(complete: list[int], limit: int | None, best: int | None, removed: list[int]) -> None:
    assert trainer_checkpoints.steps_to_remove(complete, limit, best) == removed


HEADER = trainer_checkpoints.TrainerHeader(3, "mine", 8, 2).to_bytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 1}',
        b'{"version": 2}',
        b'{"version": 1, "step": -1, "holds": "x"}',
        HEADER.replace(b"8", b"-8"),
        HEADER.replace(b'"mine"', b"3"),
        HEADER.replace(b"null", b"3", 1),
        HEADER.replace(b'"rows": null', b'"rows": 3'),
    ],
)
def test_invalid_headers_are_refused(content: bytes) -> None:
    with pytest.raises(FormatError):
        trainer_checkpoints.TrainerHeader.from_bytes(content, "header")


def test_headers_of_earlier_versions_have_neither_order_nor_rows() -> None:
    content = HEADER.replace(b',\n  "order": null,\n  "rows": null', b"")
    assert content != HEADER
    header = trainer_checkpoints.TrainerHeader.from_bytes(content, "header")
    assert (header.order, header.rows) == (None, None)


ORDERED: dict[str, Any] = {
    "seed": 1,
    "data_seed": None,
    "train_sampling_strategy": "random",
    "dataloader_drop_last": False,
    "dataloader_num_workers": 2,
    "train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}


def test_the_order_of_rows_that_depends_on_the_ranks() -> None:
    """And, of a stream with several workers, on their number. That of others is the same on any ranks."""
    more_ranks = {"gradient_accumulation_steps": 1}  # a step has 8 rows
    grouped = {"train_sampling_strategy": "group_by_length"}
    cases: list[tuple[Any, dict[str, Any], dict[str, Any], bool]] = [
        ([], {}, {**more_ranks, "dataloader_num_workers": 3}, True),
        ([], grouped, {"dataloader_num_workers": 3}, True),
        ([], grouped, more_ranks, False),
        ([], {**grouped, "train_batch_size": 4, **more_ranks}, {"train_batch_size": 2}, False),  # 4 with cp_size=2
        ([], {"dataloader_drop_last": True}, more_ranks, False),
        ([], {"dataloader_drop_last": True}, {"train_batch_size": 4}, False),
        (iter([]), {"dataloader_num_workers": 1}, {"dataloader_num_workers": 0, **more_ranks}, True),
        (iter([]), {}, more_ranks, False),
        (iter([]), {}, {"dataloader_num_workers": 3}, False),
        ([], {}, {"generation_batch_size": 8, **more_ranks}, True),
        ([], {"generation_batch_size": 16}, more_ranks, True),
        ([], {"generation_batch_size": 16}, {"generation_batch_size": 32}, False),
    ]
    for rows, first, then, is_same in cases:
        orders = [
            describe_order(SimpleNamespace(**{**ORDERED, **changes}), rows, rows_per_step=8)
            for changes in (first, {**first, **then})
        ]
        assert (orders[0] == orders[1]) is is_same, orders


def test_rows_and_the_seed_that_shuffles_them() -> None:
    """A stream has no number of rows, and is not shuffled unless TRL does it."""

    def described(rows: Any, **changes: Any) -> str:
        return describe_rows(SimpleNamespace(**ORDERED | {"seed": 7} | changes), rows)

    assert described([1, 2]) == "2 rows with seed 7"
    assert described([1, 2], data_seed=0) == "2 rows with seed 7 and data_seed 0"
    in_order = {"train_sampling_strategy": "sequential"}
    assert described([1, 2], **in_order) == "2 rows"
    assert described([1, 2], **in_order, shuffle_dataset=True) == "2 rows with seed 7"
    assert described(iter([1, 2])) == "a stream"
    assert described(iter([1, 2]), shuffle_dataset=True) == "a stream with seed 7"


def test_a_row_of_a_data_worker_is_named_without_its_trace(tmp_path: Path) -> None:
    def read() -> Iterator[None]:
        traced = (
            'Traceback (most recent call last):\n  File "x.py"\nshardwise.core.errors.ConfigError: row 6: is torn\n'
        )
        raise ConfigError(f"Caught ConfigError in DataLoader worker process 0.\nOriginal {traced}")
        yield

    trainer = unbuilt(object, tmp_path, callback_handler=SimpleNamespace(train_dataloader=None))
    with pytest.raises(ConfigError, match=r"^row 6: is torn$"):
        trainer._make_batches(World(0, 1), None, read(), 1)


def test_it_comes_before_the_trainer() -> None:
    assert type("Right", (ShardwiseTrainer, Trainer), {})
    with pytest.raises(ConfigError, match=r"class Wrong\(ShardwiseTrainer, Trainer\)"):
        type("Wrong", (Trainer, ShardwiseTrainer), {})


def test_folders_written_by_the_trainer_are_synced(tmp_path: Path) -> None:
    """As tokenizers with several chat templates have them. What was cut meanwhile does not count."""
    header = trainer_checkpoints.TrainerHeader(3, "everything", 8, 2)
    log, run = EffectLog(tmp_path / "log"), tmp_path / "run"
    place = run / "checkpoint-3"
    with recorded(log, run), trainer_checkpoints.locked_for(World(0, 1), run, 3) as saving:
        (place / "additional_chat_templates").mkdir()
        (place / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
        trainer_checkpoints.complete(saving, place, header)
        saving.locked.release()
    *_, last = states_after_crash({}, log.effects(), samples=0)
    assert last.files["checkpoint-3/additional_chat_templates/tools.jinja"] == b"{{ x }}"
    assert "checkpoint-3/shardwise.trainer.json" in last.files


def save(run: Path, step: int, holds: str = "everything") -> Path:
    """An empty checkpoint that is complete."""
    place = trainer_checkpoints.checkpoint_folder(run, step)
    with trainer_checkpoints.locked_for(World(0, 1), run, step) as saving:
        trainer_checkpoints.complete(saving, place, trainer_checkpoints.TrainerHeader(step, holds, 8, 2))
        saving.locked.release()
    return place


def unbuilt(base: type, run: Path, **attributes: Any) -> Any:
    """A trainer that is not constructed, at step 4 of a run with a limit of one checkpoint."""
    trainer: Any = object.__new__(type("Mine", (ShardwiseTrainer, base), {}))
    args = {"output_dir": str(run), "save_total_limit": 1, "save_only_model": True, "push_to_hub": False}
    state = {"global_step": 4, "best_model_checkpoint": None, "num_input_tokens_seen": 0}
    args |= attributes.pop("args", {})
    vars(trainer).update(args=SimpleNamespace(**args), state=SimpleNamespace(**state), **attributes)
    vars(trainer)["_get_output_dir"] = lambda **_: str(run)
    trainer.is_stop_requested, trainer._unevaluated = False, None
    return trainer


def test_the_header_decides_what_is_restored(tmp_path: Path) -> None:
    """And not the folder of the state, which a rank may not see yet. TRL's trainers restore what is theirs."""

    class OfTrl:
        def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
            restored.append(checkpoint)

    restored: list[str] = []
    model = nn.Linear(1, 1)
    given: dict[str, Any] = {"model": model, "optimizer": SGD(model.parameters()), "_on_other_base": "error"}
    given |= {"lr_scheduler": None, "accelerator": None}
    trainer = unbuilt(OfTrl, tmp_path, _header=trainer_checkpoints.TrainerHeader(4, "everything", 8, 2), **given)
    with pytest.raises(StorageError, match="no complete checkpoint"):
        trainer._load_optimizer_and_scheduler(str(tmp_path))
    trainer._header = trainer_checkpoints.TrainerHeader(4, trainer_checkpoints.MODEL_ALONE, 8, 2)
    (tmp_path / "state").mkdir(exist_ok=True)
    trainer._load_optimizer_and_scheduler(str(tmp_path))
    assert restored == [str(tmp_path)] * 2


def test_a_damaged_checkpoint_leads_to_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfTrl:
        def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
            pass

    def fail(*_: Any, **__: Any) -> None:
        raise FormatError("it does not match its checksum")

    monkeypatch.setattr(Checkpointer, "restore", fail)
    older, newest = save(tmp_path, 2), save(tmp_path, 4)
    model = nn.Linear(1, 1)
    given: dict[str, Any] = {"model": model, "optimizer": SGD(model.parameters()), "_on_other_base": "error"}
    given |= {"lr_scheduler": None, "accelerator": None, "_header": trainer_checkpoints.TrainerHeader(4, "", 8, 2)}
    with pytest.raises(FormatError, match=f"checksum. To resume from the checkpoint before it, remove {newest}"):
        unbuilt(OfTrl, tmp_path, **given)._load_optimizer_and_scheduler(str(newest))
    with pytest.raises(ConfigError, match="has checkpoint-4, which .* Remove them to resume from checkpoint-2"):
        trainer_checkpoints.resume_source(tmp_path, older)
    trainer_checkpoints.remove_others(tmp_path, 2)
    assert trainer_checkpoints.resume_source(tmp_path, older) == (older, False)


def test_all_but_the_best_are_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what removes the header first: the Trainer would leave headers without their files, if it is killed."""

    class Ending:
        args: Any

        def _finalize_training(self, _trial: Any) -> str:
            assert self.args.save_total_limit is None
            return "done"

    for step in (2, 4, 6):
        save(tmp_path, step)
    trainer = unbuilt(Ending, tmp_path)
    assert trainer._finalize_training(None) == "done"
    assert len(trainer_checkpoints.checkpoints_in(tmp_path)) == 3, "the best is none of this folder"
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-4")

    monkeypatch.setattr(trainer_checkpoints, "_empty", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer._finalize_training(None)
    monkeypatch.undo()
    assert trainer_checkpoints.checkpoints_in(tmp_path)[2] is trainer_checkpoints.FolderKind.INCOMPLETE
    trainer._finalize_training(None)
    assert trainer.args.save_total_limit == 1
    trainer_checkpoints.remove_incomplete_checkpoints(tmp_path)
    assert list(trainer_checkpoints.checkpoints_in(tmp_path)) == [4]


def test_a_checkpoint_with_a_file_in_use_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that a process has open stays on NFS, under another name, until it is closed."""
    unlink = os.unlink

    def rename_or_unlink(file: str) -> None:
        if Path(file).name.startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        if Path(file).name == "in use":
            os.rename(file, Path(file).with_name(".nfs01"))
        else:
            unlink(file)

    for step in (2, 4):
        (save(tmp_path, step) / "in use").touch()
    monkeypatch.setattr(os, "unlink", rename_or_unlink)
    trainer_checkpoints.remove_others(tmp_path, 4)
    assert f"{tmp_path / 'checkpoint-2'}: cannot be removed, .nfs01 is still in use" in caplog.text
    assert trainer_checkpoints.checkpoints_in(tmp_path)[2] is trainer_checkpoints.FolderKind.INCOMPLETE
    save(tmp_path, 6)
    assert list(trainer_checkpoints.checkpoints_in(tmp_path)) == [2, 4, 6]
    monkeypatch.undo()
    trainer_checkpoints.remove_incomplete_checkpoints(tmp_path)
    assert list(trainer_checkpoints.checkpoints_in(tmp_path)) == [4, 6]


def test_of_a_checkpoint_of_another_run_the_link_is_removed(tmp_path: Path) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    save(run, 6)
    save(other, 2)
    (other / "checkpoint-4").mkdir()
    (other / "checkpoint-4" / trainer_checkpoints.BEGUN_FILE).touch()  # a save in progress
    before = sorted(other.rglob("*"))
    for step in (2, 4):
        (run / f"checkpoint-{step}").symlink_to(other / f"checkpoint-{step}")
    trainer_checkpoints.remove_incomplete_checkpoints(run)
    assert list(trainer_checkpoints.checkpoints_in(run)) == [2, 6]
    trainer_checkpoints.remove_others(run, 6)
    assert list(trainer_checkpoints.checkpoints_in(run)) == [6]
    assert sorted(other.rglob("*")) == before


def test_a_model_is_saved_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Saving:
        def _save(self, output_dir: str, _state_dict: Any) -> None:
            saved.append(output_dir)

    saved: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    unbuilt(Saving, tmp_path).save_model("~/final")
    assert saved == [str(tmp_path / "final")]


def test_a_card_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is written by the first rank alone, before the others begin to save."""

    class Describing:
        def create_model_card(self, model_name: str) -> None:
            raise PermissionError(f"no card of {model_name}")

    unbuilt(Describing, tmp_path).create_model_card(model_name="mine")
    assert "README.md: the model card is not written, no card of mine" in caplog.text


def test_a_checkpoint_is_pushed_after_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pushing:
        push_in_progress = processing_class = control = None
        hub_model_id = "me/mine"
        is_world_process_zero = staticmethod(lambda: True)
        get_total_train_batch_size = staticmethod(lambda _: 8)
        callback_handler = SimpleNamespace(on_push_begin=lambda *_: None)

        def _save_checkpoint(self: Any, _model: Any, _trial: Any) -> None:
            (tmp_path / "checkpoint-4" / new).touch()
            index = {"weight_map": {"weight": new}}
            (tmp_path / "checkpoint-4" / "model.safetensors.index.json").write_text(json.dumps(index))
            self._push_from_checkpoint(str(tmp_path / "checkpoint-4"))  # as the Trainer does

        _push_from_checkpoint = Trainer._push_from_checkpoint

    old, new = (f"model-{save_id}-00001-of-00002.safetensors" for save_id in ("0a1b2c3d", "4e5f6789"))
    others = "model-00001-of-00002.safetensors"
    for name in (old, others):
        (tmp_path / name).touch()
    in_hub = [old, new, others, "state/step-2/.metadata", "README.md"]
    pushed: list[tuple[str, bool, list[str], list[str]]] = []

    def upload(_: HfApi, **keywords: Any) -> None:
        is_committed = (tmp_path / "checkpoint-4" / "shardwise.trainer.json").is_file()
        deleted = list(filter_repo_objects(in_hub, allow_patterns=keywords["delete_patterns"]))
        pushed.append((Path(keywords["folder_path"]).name, is_committed, keywords["ignore_patterns"], deleted))

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    hub = {"hub_strategy": HubStrategy.ALL_CHECKPOINTS, "hub_always_push": True, "hub_token": None}
    args = {**ORDERED, "push_to_hub": True, "hub_revision": None, "save_strategy": SaveStrategy.STEPS, **hub}
    trainer = unbuilt(Pushing, tmp_path, args=args, _saved_step=None, train_dataset=[], model=nn.Module())
    trainer._save_checkpoint(None, None)
    ignored = ["_*", "checkpoint-*", ".shardwise-*"]
    deleted = [old, new]  # but for those that are uploaded
    assert pushed == [
        (tmp_path.name, True, ignored, deleted),
        ("checkpoint-4", True, ignored[-1:], [*deleted, in_hub[3]]),
    ]
    assert sorted(tmp_path.glob("model-*")) == [tmp_path / others, tmp_path / new]

    # The shards of an upload in progress stay. At a stop nothing is pushed.
    (tmp_path / old).touch()
    trainer.push_in_progress = PushInProgress([Future()])
    trainer._push(tmp_path / "checkpoint-4")
    assert (tmp_path / old).exists()
    assert len(pushed) == 4
    shutil.rmtree(tmp_path / "checkpoint-4")
    trainer.is_stop_requested, trainer._saved_step = True, None
    trainer._save_checkpoint(None, None)
    assert len(pushed) == 4


def test_a_stop_waits_for_no_upload(tmp_path: Path) -> None:
    class Ending:
        _finish_current_push = Trainer._finish_current_push

        def _finalize_training(self: Any, _trial: Any) -> None:
            self._finish_current_push()

    begun, waiting = Future[None](), Future[None]()
    begun.set_running_or_notify_cancel()
    trainer = unbuilt(Ending, tmp_path, args={"push_to_hub": True}, is_in_train=True)
    trainer.push_in_progress = PushInProgress([begun, waiting])
    trainer.push_in_progress.wait_until_done = mock.Mock(side_effect=AssertionError("waits"))
    trainer.is_stop_requested = True
    trainer._finalize_training(None)
    assert waiting.cancelled()
    assert begun.running()


def test_a_best_checkpoint_that_is_gone_is_forgotten() -> None:
    trainer = SimpleNamespace(is_in_train=True, model=nn.Module(), callback_handler=SimpleNamespace(callbacks=[]))
    events = AgreedEvents(lambda *_: TrainerControl(), trainer)
    resumed: Any = SimpleNamespace(best_model_checkpoint="gone", max_steps=1, compute_steps=lambda *_: None)
    events("on_train_begin", None, resumed, TrainerControl())
    assert resumed.best_model_checkpoint is None


def test_a_number_of_steps_that_is_none(tmp_path: Path) -> None:
    place = save(tmp_path, 3, trainer_checkpoints.MODEL_ALONE)
    (place / "trainer_state.json").write_text(f'{{"global_step": 3, "epoch": 0.5, "max_steps": {10**400}}}')
    with pytest.raises(FormatError, match="its max_steps is damaged. Pass another checkpoint"):
        trainer_checkpoints.read_checkpoint(place)
