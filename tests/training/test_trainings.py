"""``shardwise train`` by TRL's trainers: on two ranks as on one, and as TRL alone."""

import json
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantized.requirements import needs_packed_shards
from tests.support.http_store import HttpStore
from tests.support.local_ranks import LocalRanks, RankError
from tests.support.world import run_forked as run_world
from tests.training import on_ranks, tiny
from tests.training.on_ranks import (
    Terminated,
    TerminatedInEvaluation,
    by_trl,
    prepare,
    size_of_png,
    train,
    train_until,
    train_with,
    train_without_upload,
    write_scorer,
    write_teacher,
    write_wide,
)

from shardwise.training.run_config import read_run_config
from shardwise.training.run_inputs import get_identity

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("trl"))


def losses(ranks: int, values: dict[str, Any], rows: int = 4) -> list[float]:
    """Of a training with so many rows a step on all ranks."""
    given = {**values, "per_device_train_batch_size": rows // ranks}
    given["output_dir"] = f"{values['output_dir']}-{ranks}"
    found = run_world(ranks, train, given)
    assert len({tuple(told) for _, told in found}) == 1
    logged = [entry["memory/host_gib"] for entry in found[0][0].history if "loss" in entry]
    assert all(len(by_rank) == ranks and min(by_rank) > 0.01 for by_rank in logged)
    assert size_of_png(Path(given["output_dir"], "curves.png")) == (900, 750)
    return list(found[0][1])


def keys(folder: Path, **values: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "chats.jsonl"),
        "output_dir": str(folder / "out"),
        **values,
    }


@pytest.mark.parametrize("further", [{}, {"assistant_only_loss": True, "gradient_accumulation_steps": 2}])
def test_the_losses_of_a_full_training_are_those_of_trl(folder: Path, further: dict[str, Any]) -> None:
    values = keys(folder, **further, output_dir=str(folder / f"full{len(further)}"))
    [alone] = run_world(
        1, by_trl, {**values, "per_device_train_batch_size": 4, "output_dir": str(folder / "theirs")}
    )
    assert len(alone) == 3
    assert alone[0] - alone[-1] > 0.1
    assert losses(2, values) == pytest.approx(alone, abs=1e-5)


PREFERENCES = {
    "dpo": {"method": "dpo", "dataset_name": "pairs.jsonl"},
    "kto": {"method": "kto", "dataset_name": "labels.jsonl"},
    "reward": {"method": "reward", "dataset_name": "pairs.jsonl", "model_name_or_path": "scorer"},
    "grpo": {
        "method": "grpo",
        "dataset_name": "prompts.jsonl",
        "beta": 0.0,
        "reward_funcs": ["tests.training.on_ranks.letters"],
        "num_generations": 2,
        "max_completion_length": 8,
        "max_length": None,
    },
    "orpo": {"method": "orpo", "dataset_name": "pairs.jsonl"},
    "cpo": {"method": "cpo", "dataset_name": "pairs.jsonl", "loss_type": "simpo", "cpo_alpha": 0.0},
    "tpo": {"method": "tpo", "dataset_name": "triples.jsonl"},
}
TOLERANCE = {"orpo": 1e-3, "tpo": 2e-3}
"""TRL's ORPO and TPO average over the tokens of each rank, then over ranks, so 2 rows weigh other than among 4."""
PREFERENCES["reward of a language model"] = PREFERENCES["reward"] | {"model_name_or_path": "model"}
_SCORER = {"use_peft": True, "lora_task_type": "SEQ_CLS", "lora_dropout": 0.0, "lora_modules_to_save": ["score"]}
PREFERENCES["reward of a LoRA"] = PREFERENCES["reward of a language model"] | _SCORER


@pytest.mark.parametrize("kind", ["kto", "reward", "reward of a language model", "reward of a LoRA"])
def test_a_method_trains_on_two_ranks_as_on_one(folder: Path, kind: str) -> None:
    if kind == "reward":
        write_scorer(folder)
    values = keys(folder, **PREFERENCES[kind], output_dir=str(folder / kind.replace(" ", "-")))
    for name in ("dataset_name", "model_name_or_path"):
        values[name] = str(folder / values[name])
    one, two = losses(1, values), losses(2, values)
    assert len(set(one)) == 3
    assert two == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "model", "further"),
    [
        ("dpo", "model", {"lora_modules_to_save": ["embed_tokens"]}),  # which are tied
        ("kto", "wide", {"lora_modules_to_save": ["embed_tokens", "lm_head"], "shard_adapters": False}),
        ("grpo", "model", {"lora_modules_to_save": ["embed_tokens"], "beta": 0.1}),
        ("grpo", "model", {"beta": 0.1}),
    ],
)
def test_the_losses_of_a_new_lora_with_a_reference_are_those_of_trl(
    folder: Path, kind: str, model: str, further: dict[str, Any]
) -> None:
    write_wide(folder)
    values = keys(folder, **{**PREFERENCES[kind], **further}, use_peft=True, lora_dropout=0.0)
    values |= {"model_name_or_path": str(folder / model), "lora_target_modules": "all-linear"}
    values["dataset_name"] = str(folder / values["dataset_name"])
    values["output_dir"] = str(folder / f"new-{kind}-{len(further)}")
    adapter = folder / f"initial-{kind}-{len(further)}"
    run_world(1, on_ranks.initial_adapter, values, str(adapter))
    theirs = {**values, "per_device_train_batch_size": 4, "output_dir": str(folder / "theirs")}
    [alone] = run_world(1, by_trl, theirs, adapter)
    assert len(set(alone)) == 3
    assert losses(2, values) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "orpo", "cpo", "tpo"])
def test_the_losses_of_a_full_model_are_those_of_trl(folder: Path, kind: str) -> None:
    """The reference of GRPO is a sharded model here, and a whole one in TRL."""
    values = keys(folder, **{**PREFERENCES[kind], **({"beta": 0.1} if kind == "grpo" else {})})
    values["dataset_name"] = str(folder / values["dataset_name"])
    values["output_dir"] = str(folder / f"full-{kind}")
    theirs = {**values, "per_device_train_batch_size": 4, "output_dir": str(folder / "theirs")}
    [alone] = run_world(1, by_trl, theirs)
    assert len(set(alone)) == 3
    assert losses(2, values) == pytest.approx(alone, abs=TOLERANCE.get(kind, 1e-5))
    if kind in TOLERANCE:
        assert losses(1, values) == pytest.approx(alone, abs=1e-5)


def test_grpo_of_a_full_model_trains_on_two_ranks_as_on_one(folder: Path) -> None:
    """The loss is 0 in a step that has generated, and another one in the step that trains on that once more."""
    values = keys(folder, **PREFERENCES["grpo"], num_iterations=2, max_steps=4, output_dir=str(folder / "grpo"))
    values["dataset_name"] = str(folder / "prompts.jsonl")
    one, two = losses(1, values), losses(2, values)
    assert len(set(one)) > 2
    assert two == pytest.approx(one, abs=1e-5)
    alone, both = (load_file(folder / f"grpo-{ranks}" / "model.safetensors") for ranks in (1, 2))
    assert all(torch.allclose(both[name], alone[name], atol=1e-5) for name in alone)


SAMPLED: dict[str, dict[str, Any]] = {
    "rloo": {"method": "rloo", "beta": 0.1},
    "gmpo": {"method": "gmpo", "beta": 0.1},
    "distillation": {"method": "distillation"},
    "distillation of a LoRA": {
        "method": "distillation",
        "use_peft": True,
        "lora_dropout": 0.0,
        "gradient_accumulation_steps": 2,
    },
    "a reward model": {
        "beta": 0.1,
        "reward_funcs": [*PREFERENCES["grpo"]["reward_funcs"], "think_format_reward", "scorer"],
        "reward_weights": [1.0, 0.25, 0.5],
    },
    "a reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
}
LOGGED = ("loss", "grad_norm", "reward", "kl", "entropy", "rewards/scorer/mean", "rewards/think_format_reward/mean")


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_method_that_samples_trains_as_in_trl(folder: Path, kind: str) -> None:
    """With the same samples. References, teachers and reward models are sharded here, and whole ones in TRL.

    One reward function is TRL's own.
    """
    write_scorer(folder)
    write_teacher(folder)
    values = keys(folder, **{**PREFERENCES["grpo"], "dataset_name": str(folder / "prompts.jsonl"), **SAMPLED[kind]})
    values["output_dir"] = str(folder / kind.replace(" ", "-"))
    if kind == "a reward model":
        values["reward_funcs"] = [*values["reward_funcs"][:2], str(folder / "scorer")]
    if values["method"] == "distillation":
        values["teacher_model_name_or_path"] = str(folder / "teacher")
        for key in ("reward_funcs", "num_generations", "beta"):
            del values[key]
    adapter = None
    if values.get("use_peft"):
        adapter = folder / "student"
        run_world(1, on_ranks.initial_adapter, values, str(adapter))
    theirs = {**values, "per_device_train_batch_size": 4, "output_dir": str(folder / "theirs")}
    [alone] = run_world(1, on_ranks.log_by_trl, theirs, adapter)
    names = [name for name in LOGGED if name in alone[0]]
    wanted = [entry[name] for entry in alone if "loss" in entry for name in names]
    assert len(wanted) == 3 * len(names) > 6
    for ranks in (1, 2) if kind == "a reward model" else (2,):
        sized = {
            **values,
            "per_device_train_batch_size": 4 // ranks,
            "output_dir": f"{values['output_dir']}-{ranks}",
        }
        outcomes = run_world(ranks, on_ranks.train_with_shares, sized)
        found = [entry[name] for entry in outcomes[0][0].history if "loss" in entry for name in names]
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5), ranks
        shares = [held for _, held in outcomes]
        if kind == "a reward model":
            assert {name.partition(".")[0] for name in shares[0]} == {
                "FSDPQwen3ForCausalLM",
                "FSDPQwen3ForSequenceClassification",
            }
        for name, (elements, held) in shares[0].items():
            assert held + sum(other[name][1] for other in shares[1:]) == elements, name


def test_a_reward_rises_and_a_killed_training_resumes_on_other_ranks(folder: Path) -> None:
    """As TRL in one process with the same samples, before and after."""
    values = keys(folder, **PREFERENCES["grpo"], max_steps=8, save_strategy="steps", save_steps=2)
    values |= {
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "dataset_name": str(folder / "prompts.jsonl"),
        "reward_funcs": ["tests.training.on_ranks.share_of_ascii"],
    }
    theirs = {**values, "per_device_train_batch_size": 4, "output_dir": str(folder / "rising-theirs")}
    [alone] = run_world(1, on_ranks.log_by_trl, theirs)
    wanted = [entry["reward"] for entry in alone if "loss" in entry]
    assert wanted[0] == 0.5
    assert wanted[-1] > 0.9
    values["output_dir"] = str(folder / "rising")
    with pytest.raises(RankError):
        run_world(2, train_until, {**values, "per_device_train_batch_size": 2}, 4, signal.SIGKILL)
    assert (folder / "rising" / "checkpoint-2" / "trainer_state.json").is_file()
    [(resumed, _)] = run_world(1, train, {**values, "per_device_train_batch_size": 4})
    whole = {**values, "per_device_train_batch_size": 2, "output_dir": str(folder / "rising-2")}
    for history in (resumed.history, run_world(2, train, whole)[0][0].history):
        assert [entry["reward"] for entry in history if "loss" in entry] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_reference_of_a_full_training_is_sharded(folder: Path, method: str) -> None:
    """Also between the steps, and after them: each rank holds its part of every parameter."""
    values = keys(folder, method=method, output_dir=str(folder / f"reference-{method}"), ddp_timeout=900)
    values["dataset_name"] = str(folder / PREFERENCES[method]["dataset_name"])
    before, after = zip(*run_world(2, on_ranks.shares_of_reference, values), strict=True)
    for first, second in (before, after):
        assert len(first) > 10
        for name, (elements, held) in first.items():
            assert held == elements // 2 == elements - second[name][1], name


def test_masks_without_trl_train_the_same_tokens_as_its_marks(folder: Path) -> None:
    values = keys(folder, assistant_only_loss=True, output_dir=str(folder / "marked"))
    marked = losses(1, values)
    for template in (tiny.UNMARKED, tiny.FORGETFUL):
        tiny.write_model(folder / "unmarked")
        tiny.tokenizer(template).save_pretrained(folder / "unmarked")
        unmarked = {**values, "model_name_or_path": str(folder / "unmarked"), "output_dir": str(folder / "masked")}
        shutil.rmtree(folder / "masked-2", ignore_errors=True)
        is_same = losses(2, unmarked) == pytest.approx(marked, abs=1e-5)
        assert is_same == (template == tiny.UNMARKED)


def test_rows_that_trl_cannot_mask_have_masks(folder: Path) -> None:
    """By a template with marks, of which one message counts not, and by one without."""
    said: Any = tiny.chat("Hi", "Ho", "and", "so")["messages"]
    cases: list[dict[str, Any]] = []
    for name, template, weights in (("marked", tiny.MARKED, {"weight": 0}), ("unmarked", tiny.UNMARKED, {})):
        tiny.tokenizer(template).save_pretrained(folder / f"{name}-masks")
        rows = {"messages": [said[0], {**said[1], **weights}, *said[2:]]}
        file = tiny.write_rows(folder / f"{name}.jsonl", rows)
        values = keys(folder, assistant_only_loss=True, dataset_name=str(file), max_steps=1)
        values["tokenizer_name_or_path"] = str(folder / f"{name}-masks")
        cases += [values, {**values, "dataset_streaming": True}]
    [found] = run_world(1, on_ranks.first_rows, cases)
    trained = []
    for is_left_to_trl, row in found:
        assert not is_left_to_trl
        text = tiny.tokenizer().decode([token for token, is_in in zip(*row.values(), strict=True) if is_in])
        trained.append((text.count("so"), "Ho" in text))
    assert trained == [(1, False), (1, False), (1, True), (1, True)]


def test_a_file_of_accelerate_shards_the_model(folder: Path) -> None:
    given = {"distributed_type": "FSDP", "mixed_precision": "no", "num_processes": 8}
    given["fsdp_config"] = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}
    (folder / "fsdp.yaml").write_text(json.dumps(given))
    values = keys(folder, accelerate_config=str(folder / "fsdp.yaml"), output_dir=str(folder / "accelerated"))
    plain = {**values, "accelerate_config": None, "output_dir": str(folder / "plain")}
    assert losses(2, values) == pytest.approx(losses(1, plain), abs=1e-5)


@needs_packed_shards
def test_a_base_in_four_bits(folder: Path) -> None:
    lora = {"use_peft": True, "load_in_4bit": True, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"]}
    values = keys(folder, **lora, model_name_or_path=str(write_wide(folder)), output_dir=str(folder / "nf4"))
    assert losses(2, values) == pytest.approx(losses(1, values), abs=1e-5)


_SAMPLED = PREFERENCES["grpo"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dp_replicate_size": 2}, "2 replicas: 2 ranks cannot be divided"),
    ({"activation_offloading": True, "gradient_checkpointing": False}, "activation_offloading: without gradient"),
    ({"dataset_name": "nowhere.jsonl"}, "nowhere.jsonl: cannot be loaded"),
    ({"eval_strategy": "steps"}, "test: is not a split"),
    ({"dataset_name": "images.jsonl"}, "images: the model has no processor for images"),
    ({"model_name_or_path": "padded"}, "pad_token: has the id 269, and the model has embeddings for 0 to 259"),
    ({"accelerate_config": "half.json"}, "accelerate_config: mixed_precision fp16 needs fp16: true"),
    ({"report_to": "wandb"}, "report_to: wandb cannot be used, WandbCallback requires wandb"),
    ({"dataset_name": "nulls.jsonl"}, "row 2 of the dataset: text: is null"),
    ({"dataset_name": "nulls.jsonl", "dataset_streaming": True}, "row 2 of the dataset: text: is null"),
    ({"dataset_name": "unanswered.jsonl", "assistant_only_loss": True}, "row 2 of the dataset: messages: none has"),
    ({"method": "kto", "dataset_name": "unlabeled.jsonl"}, "row 2 of the dataset: label: is null, not a boolean"),
    ({"dataset_name": "nulls.jsonl", "assistant_only_loss": True}, "assistant_only_loss: the rows have no chats"),
    ({**_SAMPLED, "dataset_name": "nulls.jsonl"}, "prompt: is no column of the dataset"),
    # Before the model is loaded, whose padding token has no embedding.
    (
        {**_SAMPLED, "model_name_or_path": "padded", "reward_funcs": ["rewards.lenght"]},
        "reward_funcs: rewards.lenght cannot be imported, No module named 'rewards'. Check the path",
    ),
    ({"dataset_name": "long.jsonl", "max_length": 16}, "max_length: 16 leaves no row of train with a token"),
    ({"dataset_name": "words.jsonl"}, "uses '<9>'. The tokenizer gives it the id 268, and the model has embed"),
    (
        {"dataset_name": "words.jsonl", "dataset_streaming": True},
        "uses '<9>'. The tokenizer gives it the id 268",
    ),
    ({"optim": "adamw_torch_8bit"}, "optim: adamw_torch_8bit cannot be created, You need to have `torchao"),
    (
        {"lr_scheduler_type": "cosine_with_min_lr"},
        "lr_scheduler_kwargs {} do not fit lr_scheduler_type cosine_with_min_lr, One of",
    ),
    ({"lr_scheduler_kwargs": {"power": 2}}, "{'power': 2} do not fit lr_scheduler_type "),
    ({**_SAMPLED, "use_vllm": True}, "use_vllm: vLLM is not installed"),
    ({"dataset_name": "one.jsonl", "dataloader_drop_last": True}, "has fewer rows (1) than a batch of all ranks"),
]


def test_invalid_configurations_are_one_error_on_all_ranks(folder: Path) -> None:
    tiny.write_rows(folder / "images.jsonl", {**tiny.chat("Hi", "Ho"), "images": ["a.png"]})
    tiny.write_rows(folder / "nulls.jsonl", {"text": "Hi"}, {"text": None})
    tiny.write_rows(folder / "unanswered.jsonl", tiny.chat("Hi", "Ho"), tiny.chat("Hi"))
    labeled = [{"prompt": "Hi", "completion": "Ho", "label": label} for label in (True, None)]
    tiny.write_rows(folder / "unlabeled.jsonl", *labeled)
    tiny.write_rows(folder / "long.jsonl", *[{"prompt": "Hi " * 9, "completion": "Ho"} for _ in range(4)])
    tiny.write_rows(folder / "words.jsonl", {"text": "Hi"}, {"text": "Hi <9>"})
    tiny.write_rows(folder / "one.jsonl", tiny.chat("Hi", "Ho"))
    (folder / "half.json").write_text('{"mixed_precision": "fp16", "fsdp_config": {"fsdp_version": 2}}')
    tiny.write_model(folder / "padded")
    padded = tiny.tokenizer()
    padded.add_tokens([f"<{number}>" for number in range(10)])
    padded.save_pretrained(folder / "words")
    padded.add_special_tokens({"pad_token": "<pad>"})
    padded.save_pretrained(folder / "padded")
    cases = []
    for changes, _ in REFUSED:
        values = {
            key: str(folder / text) if (folder / str(text)).exists() else text for key, text in changes.items()
        }
        if changes.get("dataset_name") == "words.jsonl":
            values["tokenizer_name_or_path"] = str(folder / "words")
        cases.append(keys(folder, **values, output_dir=str(folder / "refused"), per_device_train_batch_size=2))
    for errors in run_world(2, on_ranks.errors_of_all, cases):
        for error, (_, message) in zip(errors, REFUSED, strict=True):
            assert message in error


def test_credentials_are_not_recorded() -> None:
    signed = "https://user:pass@host/data.jsonl?signature=abc"
    words = on_ranks.words({"dataset_name": signed, "datasets": [{"path": signed}]})
    told = get_identity(read_run_config(words), "sft")
    assert told["dataset_name"] == "https://host/data.jsonl"
    assert told["datasets"] == [{"path": "https://host/data.jsonl"}]


@pytest.mark.parametrize(
    "kind", [{}, {"use_peft": True}, {"adapters": {"ada": {}}, "gradient_checkpointing": False}]
)
def test_credentials_are_in_no_file(folder: Path, kind: dict[str, Any]) -> None:
    output = folder / f"secret{len(kind)}"
    with HttpStore(folder / "model") as store:
        url = store.url.replace("//", "//user:hunter2secret@")
        values = keys(folder, **kind, model_name_or_path=url, tokenizer_name_or_path=str(folder / "model"))
        values |= {
            "save_strategy": "steps",
            "save_steps": 1,
            "hub_token": None if kind.get("adapters") else "hf_hidden",
        }
        [(outcome, _)] = run_world(
            1, train, {**values, "output_dir": str(output), "per_device_train_batch_size": 4}
        )
    files = [file for file in output.rglob("*") if file.is_file()]
    assert len(files) > 5
    found = {str(file): file.read_bytes() for file in files} | {"outcome": str(outcome).encode()}
    assert [name for name, content in found.items() if b"hunter2" in content or b"hf_hidden" in content] == []


def test_a_folder_of_another_training_is_left_alone(folder: Path) -> None:
    values = keys(folder, output_dir=str(folder / "kept"), per_device_train_batch_size=4)
    values |= {"dataset_name": None, "datasets": 2 * [{"path": str(folder / "chats.jsonl")}]}
    [messages] = run_world(1, on_ranks.warnings_without_matplotlib, values)
    [message] = [text for text in messages if "curves.png" in text]
    assert message.endswith("kept/curves.png: is not drawn without matplotlib. Run pip install 'shardwise[report]'")
    with pytest.raises(RankError, match="output_dir: .* has a training with use_peft=False, not True"):
        run_world(1, train, {**values, "use_peft": True})


def test_a_signal_saves_and_the_same_keys_resume_on_another_number_of_ranks(folder: Path) -> None:
    """A stream of 8 rows in 4 files is in its second pass after the signal. 4 rows in 2 files are evaluated."""
    values = keys(folder, max_steps=5, save_strategy="steps", save_steps=50, gradient_checkpointing=False)
    rows = tiny.write_chats(folder / "few.jsonl", 8).read_text().splitlines()
    (folder / "few").mkdir()
    for split, sizes in {"train": (5, 1, 1, 1), "test": (3, 1)}.items():
        for number, size in enumerate(sizes):
            start = sum(sizes[:number])
            tiny.write_rows(folder / "few" / f"{split}-{number}.jsonl", *rows[start : start + size])
    values |= {
        "dataset_name": str(folder / "few"),
        "dataset_streaming": True,
        "output_dir": str(folder / "stopped"),
    }
    values |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}
    stopped = run_world(2, train_until, {**values, "per_device_train_batch_size": 2}, 3)
    assert {(outcome.has_stopped, outcome.steps) for outcome in stopped} == {(True, 3)}
    assert not list((folder / "stopped").glob("*.safetensors"))
    [(resumed, told)] = run_world(1, train, {**values, "per_device_train_batch_size": 4})
    [(again, _)] = run_world(1, train, {**values, "per_device_train_batch_size": 4})  # nothing is left to train
    assert {(one.has_stopped, one.steps) for one in (resumed, again)} == {(False, 5)}
    whole = {**values, "output_dir": str(folder / "whole"), "per_device_train_batch_size": 4}
    [(_, expected)] = run_world(1, train, whole)
    assert told == pytest.approx(expected, abs=1e-5)
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("stopped", "whole"))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


LIMITED = {"eval_strategy": "steps", "save_strategy": "steps", "save_total_limit": 1}


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        (LIMITED, Terminated(4)),
        ({"eval_strategy": "epoch", "save_strategy": "best"}, Terminated(3)),
        (LIMITED, TerminatedInEvaluation(4)),
    ],
)
def test_a_signal_saves_without_an_evaluation_and_keeps_the_checkpoint(
    folder: Path, kind: dict[str, Any], stop: Terminated
) -> None:
    """The loss falls, so that the first evaluation is the best. The one left out is made up by the resume."""
    output = folder / f"signaled-{kind['save_strategy']}-{type(stop).__name__}"
    values = keys(folder, **kind, output_dir=str(output), max_steps=6, test_split_size=0.2)
    values |= {"eval_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, "gradient_checkpointing": False}
    values |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    values |= {"per_device_eval_batch_size": 1}
    for outcome in run_world(2, train_with, values, stop):
        assert outcome.has_stopped
        evaluated = [entry["step"] for entry in outcome.history if "eval_loss" in entry]
        assert evaluated == ([2] if kind["eval_strategy"] == "steps" else [])
    assert (output / f"checkpoint-{stop.step}" / "shardwise.trainer.json").exists()
    assert not (output / "curves.png").exists()
    [(outcome, _), _] = run_world(2, train, values)
    assert (outcome.has_stopped, outcome.steps) == (False, 6)
    if "save_total_limit" in kind:
        evaluated = [entry["step"] for entry in outcome.history if "eval_loss" in entry]
        assert evaluated == [2, 4, 6], "that of the stop is made up"
        assert [place.name for place in output.glob("checkpoint-*")] == ["checkpoint-2"]


DIFFERING = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 0.3,
    "max_length": 33,
    "assistant_only_loss": True,
    "save_steps": 3,
    "learning_rate": 0.3,
    "seed": 3,
    "method": "reward",
}


def test_ranks_with_other_settings_or_rows_are_refused(folder: Path) -> None:
    rows = (folder / "chats.jsonl").read_text().splitlines()
    tiny.write_rows(folder / "shorter.jsonl", *rows[:-1])
    tiny.write_rows(folder / "other.jsonl", *rows[:9], rows[3], *rows[10:])
    tiny.write_rows(folder / "same.jsonl", *rows)
    files = ["shorter.jsonl", "other.jsonl"]
    cases = [{key: value} for key, value in DIFFERING.items()]
    lora = {"adapters": {"ada": {"lora_r": 3}}, "gradient_checkpointing": False}
    values = keys(folder, output_dir=str(folder / "differing"))
    told = run_world(2, on_ranks.errors_of, values, cases)
    assert told[0] == told[1]
    for key, text in zip(DIFFERING, told[0], strict=True):
        assert text.startswith("the configuration on rank 1 is not that of rank 0: ")
        assert f"{key} (" in text
    [text], _ = run_world(2, on_ranks.errors_of, {**values, **lora}, [{"adapters": {"ada": {"lora_r": 4}}}])
    assert "ada.lora_r (4 against 3)" in text
    # The same name on each rank, of a file of its own.
    for name, words in zip(files, ("number of rows (23 against 24)", "rows ("), strict=True):
        with pytest.raises(RankError, match=r"the dataset 'train' on rank 1 is not that of rank 0") as caught:
            run_world(2, on_ranks.train_on_own_rows, values, str(folder / name))
        assert words in str(caught.value)
    run_world(2, on_ranks.train_on_own_rows, values, str(folder / "same.jsonl"))


@pytest.mark.parametrize(
    ("kind", "doing"),
    [
        ("tracker", "busy with the callbacks of on_log"),
        ("collator", "busy with the next batch"),
    ],
)
def test_a_rank_that_takes_long_is_named_by_the_one_that_waits(folder: Path, kind: str, doing: str) -> None:
    values = keys(folder, output_dir=str(folder / f"slow-{kind}"), per_device_train_batch_size=2)
    named = f"for rank 1, which has been {doing} for "
    told, _ = run_world(2, on_ranks.warnings_of_a_slow_rank, values, kind, named, str(folder / f"warned-{kind}"))
    texts = [text for text in told if named in text]
    assert texts
    assert all(text.startswith("rank 0 has been waiting for ") for text in texts)


def test_a_run_without_its_record_ends_and_a_copy_says_what_is_missing(folder: Path) -> None:
    values = keys(folder, max_steps=3, save_strategy="steps", save_steps=2, gradient_checkpointing=False)
    values |= {"output_dir": str(folder / "removed"), "per_device_train_batch_size": 4}
    for text in run_world(2, on_ranks.error_without_record, values, 2):
        assert "run.json: was removed during the training" in text
    assert not list((folder / "removed").rglob("*.safetensors"))
    values["output_dir"] = str(folder / "original")
    run_world(1, train, values)
    shutil.copytree(folder / "original", folder / "copy", ignore=shutil.ignore_patterns(".*"))  # cp -r original/*
    values |= {"output_dir": str(folder / "copy"), "max_steps": 4}
    with pytest.raises(RankError, match=r"no record of its own training.* copy that folder, too"):
        run_world(1, train, values)
    shutil.copytree(folder / "original", folder / "copy", dirs_exist_ok=True)
    [(outcome, _)] = run_world(1, train, values)
    assert outcome.steps == 4
    assert outcome.summary[0].startswith("trained 1 step after step 3 in ")


def test_a_loss_that_is_not_finite_is_shown_and_an_error_at_the_end(folder: Path) -> None:
    values = keys(folder, output_dir=str(folder / "nan"), max_steps=4, learning_rate=1e30, optim="sgd")
    values |= {"per_device_train_batch_size": 2, "max_grad_norm": 0}
    with pytest.raises(RankError, match=r"TrainingError: the loss is nan from step \d to the end") as caught:
        run_world(2, train_without_upload, values)
    assert len(caught.value.failures) == 2
    assert list((folder / "nan").glob("*.safetensors"))
    assert (folder / "nan" / "curves.png").exists()
    values |= {"logging_nan_inf_filter": True, "output_dir": str(folder / "filtered")}
    [(_, losses), _] = run_world(2, train, values)
    assert 0.0 in losses


def test_early_stopping_is_no_signal_and_trackers_get_the_memory_of_each_rank(folder: Path) -> None:
    values = keys(folder, output_dir=str(folder / "early"), per_device_train_batch_size=4, learning_rate=1.0)
    values |= {"max_steps": 20, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
    values |= {"eval_steps": 1, "test_split_size": 0.2, "load_best_model_at_end": True}
    values["early_stopping_patience"] = 1
    [(outcome, tracked, estimates), (*_, others)] = run_world(2, on_ranks.train_with_tracker, values)
    assert (estimates, others) == (1, 0), "the first rank alone estimates the memory, and a failure is logged"
    assert outcome.steps < 20
    assert not outcome.has_stopped
    assert (folder / "early" / "model.safetensors").exists()
    logged = [entry["memory/host_gib"] for entry in outcome.history if "loss" in entry]
    assert tracked == [
        {"memory/host_gib/rank_0": first, "memory/host_gib/rank_1": second} for first, second in logged
    ]


def test_blocks_are_compiled_and_nothing_else_with_the_same_losses(folder: Path) -> None:
    """Neither accelerate nor the Trainer compiles the whole model; on CPUs a line says that Liger needs a GPU."""
    values = keys(folder, output_dir=str(folder / "uncompiled"))
    expected = losses(1, values)
    values |= {"torch_compile_backend": "aot_eager", "use_liger_kernel": True, "per_device_train_batch_size": 2}
    found = run_world(2, on_ranks.train_compiled, values | {"output_dir": str(folder / "compiled")})
    for rank, run in enumerate(found):
        assert run["losses"] == pytest.approx(expected, abs=1e-5)
        assert [name.rpartition("layers.")[2] for name in run["blocks"]] == ["0", "1"]
        assert run["others"] == []
        told = [line for line in run["warnings"] if "Liger's kernels need a GPU" in line]
        assert len(told) == (rank == 0)


def test_a_reward_model_without_its_head_is_refused(folder: Path) -> None:
    scorer = write_scorer(folder)
    weights = {key: value for key, value in load_file(scorer / "model.safetensors").items() if "score" not in key}
    save_file(weights, scorer / "model.safetensors", {"format": "pt"})
    values = keys(folder, method="reward") | {"model_name_or_path": str(scorer)}
    with pytest.raises(RankError, match="is a reward model without score.weight"):
        run_world(1, train, values | {"dataset_name": str(folder / "pairs.jsonl"), "output_dir": str(folder / "u")})


def test_of_two_trainings_started_together_in_one_folder_one_is_refused(folder: Path) -> None:
    values = keys(folder, output_dir=str(folder / "shared"), gradient_checkpointing=False)
    refused = []
    with ExitStack() as stack:
        both = [stack.enter_context(LocalRanks(1, is_forked=True)) for _ in range(2)]
        for ranks, use_peft in zip(both, (True, None), strict=True):
            ranks.start(on_ranks.train_until_refused, {**values, "use_peft": use_peft}, str(folder / "refused.txt"))
        for ranks, weights in zip(both, ("adapter_model", "model"), strict=True):
            try:
                [(outcome, _)] = ranks.finish()
                assert outcome.steps == 3
                assert [file.stem for file in (folder / "shared").glob("*.safetensors")] == [weights]
            except RankError as error:
                refused.append(str(error))
    assert len(refused) == 1
    assert "another save is writing here" in refused[0]
