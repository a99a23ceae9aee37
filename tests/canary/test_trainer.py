"""The meaning of unexported names of transformers' Trainer and of TRL."""

import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.requirements import require_patched_names
from tests.training import tiny
from transformers import Trainer, TrainingArguments
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import compare_trainer_and_checkpoint_args

require_patched_names()
from shardwise.cli.train import has_other_differences  # noqa: E402
from shardwise.integrations import trainer_compat as compat  # noqa: E402


@pytest.fixture
def model() -> Any:
    made = tiny.model()
    compat.add_marks(made, 2)
    return made


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **given)


def test_a_marked_model_is_left_alone_and_its_checkpoints_are_refused(model: Any, tmp_path: Path) -> None:
    assert compat.is_open(model)
    assert is_fsdp_managed_module(model)
    with pytest.raises(ValueError, match="Resuming is not supported for models sharded at load time"):
        Trainer(model=model, args=arguments(tmp_path, save_strategy="steps"))
    trainer = Trainer(model=model, args=arguments(tmp_path, save_only_model=True))
    assert not trainer.place_model_on_device
    assert trainer.get_tp_size() == 1, "without a mark of its own"
    assert trainer.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True) is model


def test_gradients_are_put_off_by_the_models_own_switch(model: Any, tmp_path: Path) -> None:
    if not hasattr(Trainer, "_defer_fsdp_gradient_reduction"):
        pytest.skip("this transformers has accelerate put them off")
    trainer = Trainer(model=model, args=arguments(tmp_path, save_only_model=True))
    told: list[Any] = []
    model.set_requires_all_reduce = lambda value: told.append(("all-reduce", value))
    model.set_requires_gradient_sync = lambda value: told.append(("all", value))
    with trainer._defer_fsdp_gradient_reduction():
        told.append("passes")
    assert told == [("all-reduce", False), "passes", ("all", True)]


def test_the_mark_is_not_saved(model: Any, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    assert "distributed_config" not in (tmp_path / "config.json").read_text()


def test_parameters_that_are_averaged_are_identified_by_a_mark() -> None:
    assert compat.HOOKED in inspect.getsource(Trainer._sync_replicated_trainable_parameters)


def test_the_trainer_calls_the_overridden_methods() -> None:
    """The Trainer saves and resumes by the methods that ShardwiseTrainer overrides."""
    saving = inspect.getsource(Trainer._save_checkpoint)
    for name in (
        "save_model",
        "_save_optimizer_and_scheduler",
        "_save_scaler",
        "_save_rng_state",
        "_push_from_checkpoint",
        "rotate_checkpoints",
    ):
        assert f"{name}(" in saving, name
    assert "self.args.save_total_limit" in saving
    assert "self._finish_current_push(" in inspect.getsource(Trainer._finalize_training)
    assert "save_pretrained(" in inspect.getsource(Trainer._save)
    assert "self._load_from_checkpoint(" in inspect.getsource(Trainer.train)
    preparing = inspect.getsource(Trainer._prepare_for_training)
    assert "self._load_optimizer_and_scheduler(" in preparing
    assert "self._load_rng_state(" in inspect.getsource(Trainer._run_epoch)
    assert "self.call_event(" in inspect.getsource(CallbackHandler)


def test_trainers_of_trl() -> None:
    trl = pytest.importorskip("trl")
    assert compat.is_trl_trainer(trl.SFTTrainer)
    assert not compat.is_trl_trainer(Trainer)
    assert compat.wants_reference(trl.DPOTrainer)
    assert not compat.wants_reference(trl.SFTTrainer)
    assert not compat.wants_reference(trl.GRPOTrainer)
    assert f'model.add_adapter("{compat.REFERENCE}"' in inspect.getsource(trl.DPOTrainer)
    assert "model.get_parameter(ref_name)" in inspect.getsource(trl.DPOTrainer)
    for kind in (trl.GRPOTrainer, trl.RLOOTrainer):
        assert "self.ref_model = create_model_from_path(" in inspect.getsource(kind)
        assert "self.reward_func_names = []" in inspect.getsource(kind)
        assert "rewards_per_func = gather(rewards_per_func)" in inspect.getsource(kind._calculate_rewards)
    for kind in (trl.GRPOTrainer, trl.RLOOTrainer, trl.DistillationTrainer):
        assert "self.vllm_generation = VLLMGeneration(" in inspect.getsource(kind)
        assert f"or self.{compat.ANSWERS} is None:" in inspect.getsource(kind._prepare_inputs)
        assert f"if self.{compat.MICRO_BATCH} % generate_every == 0 or" in inspect.getsource(kind._prepare_inputs)
        assert f"self.{compat.MICRO_BATCH} += 1" in inspect.getsource(kind.training_step)
    assert "self.teacher_model = " in inspect.getsource(trl.DistillationTrainer)
    assert f"self.{compat.REDIRECTION} = _ForwardRedirection()" in inspect.getsource(trl.DistillationTrainer)


def test_the_engine_of_trl() -> None:
    generation = pytest.importorskip("trl.generation.vllm_generation")
    starting = inspect.getsource(generation.VLLMGeneration._init_vllm)
    assert "if is_bitsandbytes_available():" in starting
    assert starting.rstrip().endswith("accelerator.wait_for_everyone()")
    sending = inspect.getsource(generation.VLLMGeneration.sync_weights)
    assert "if self._weight_metadata is None:" in sending
    assert "self.vllm_client.update_named_params(self._weight_metadata, self._iter_named_params())" in sending
    assert "in self._iter_named_params():" in sending
    client = pytest.importorskip("trl.generation.vllm_client").VLLMClient
    for asking in map(inspect.getsource, (client.init_communicator, client.update_named_params)):
        assert "with ThreadPoolExecutor(max_workers=1) as executor:" in asking
        assert "executor.submit(" in asking
        assert "future.result()" in asking
    assert 'self._post, f"{self.base_url}/update_weights"' in asking
    assert "self.session.post(url, **kwargs)" in inspect.getsource(client._post)


@pytest.mark.parametrize(
    ("rows", "steps", "warned"),
    [(4, 9, ["logging_steps", "per_device_train_batch_size"]), (4, 10, []), (2, 9, ["logging_steps"])],
)
def test_a_comparison_is_not_shown_if_only_the_rows_of_a_rank_differ(
    monkeypatch: pytest.MonkeyPatch, rows: int, steps: int, warned: list[str]
) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers.trainer_utils")
    for name, value in (("level", logging.WARNING), ("handlers", [handler]), ("filters", [has_other_differences])):
        monkeypatch.setattr(log, name, value)
    args = SimpleNamespace(per_device_train_batch_size=rows, logging_steps=steps, n_gpu=1)
    compare_trainer_and_checkpoint_args(args, SimpleNamespace(train_batch_size=2, logging_steps=10))
    lines = [line for text in told for line in text.splitlines()]
    assert [line.partition(":")[0].strip() for line in lines[1:]] == warned
