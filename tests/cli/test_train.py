"""`train` from the command line, and where its ranks come from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from inspect import signature
from pathlib import Path

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner, Result
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.training import tiny
from tests.training.stub_hub import stub_hub
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli import launch
from shardwise.cli import train as train_cli
from shardwise.cli.launch import InThisProcess, Launch, Launched, Spawned, read_launch, run_ranks
from shardwise.cli.train import NOT_PUSHED, STOPPED, StepLog, train_command
from shardwise.errors import ConfigError, StorageError
from shardwise.execution.memory import first_touch
from shardwise.planning.loads.pages import Way
from shardwise.storage.names import HubOptions
from shardwise.training import prepare, session
from shardwise.training.configuration.config import read_config
from shardwise.training.report import Event, StepFacts

# click before 8.2 mixes stderr into stdout unless told not to.
MIXES = "mix_stderr" in signature(CliRunner).parameters
RUNNER = CliRunner(**({"mix_stderr": False} if MIXES else {}))

FAST = (
    "optimizer.learning_rate=3e-3",
    "training.max_steps=25",
    "training.batch_size=2",
    "schedule.warmup_ratio=0.1",
    "checkpoints.every=null",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return tiny.write_chats(tmp_path / "chats.jsonl", 8)


def run(*arguments: object) -> Result:
    return RUNNER.invoke(train_command, [str(argument) for argument in arguments])


def command(*arguments: object) -> list[str]:
    """``shardwise train`` as a process of its own: so it is where the output of its ranks matters."""
    program = "from shardwise.cli.train import train_command; train_command()"
    return [sys.executable, "-c", program, *map(str, arguments)]


def needed(model: object, data: object, output: Path) -> tuple[str, str, str]:
    return f"model={model}", f"data={data}", f"output={output / 'out'}"


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.mark.distributed
def test_training_on_two_ranks(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {checkpoint}\ndata: {chats}\noutput: {out}\nevaluation: {{data: {chats}, every: 10}}\n"
    )
    start = command(config, *FAST, "--nproc-per-node", 2, "--json")
    result = subprocess.run(start, check=False, timeout=100, capture_output=True, text=True)
    told = result.stderr
    assert result.returncode == 0, told
    ranks = json.loads(result.stdout)["ranks"]
    assert [rank["load"]["rank"] for rank in ranks] == [0, 1]
    assert [rank["train"]["world_size"] for rank in ranks] == [2, 2]
    losses = [[step["loss"] for step in rank["train"]["steps"]] for rank in ranks]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2
    assert [rank["save"]["is_verified"] for rank in ranks] == [True, True]
    trained, untrained = (AutoModelForCausalLM.from_pretrained(place) for place in (out / "last", checkpoint))
    assert trained.dtype == untrained.dtype
    assert not torch.equal(trained.get_input_embeddings().weight, untrained.get_input_embeddings().weight)
    assert len(AutoTokenizer.from_pretrained(out / "last")) == len(AutoTokenizer.from_pretrained(checkpoint))
    assert "training: 25 steps on 2 ranks" in told
    steps = [line.split() for line in told.splitlines() if line.startswith("step")]
    places = ["1/25", "10/25", "10/25", "20/25", "20/25", "25/25", "25/25"]
    assert [next(word for word in words if "/25" in word) for words in steps] == places
    assert steps[2][-4:] == ["the", "best", "so", "far"]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in metrics if line["kind"] == "step"] == losses[0]
    evaluations = [line["loss"] for line in metrics if line["kind"] == "evaluation"]
    assert evaluations == sorted(evaluations, reverse=True)
    best = AutoModelForCausalLM.from_pretrained(out / "best")
    assert torch.equal(best.get_input_embeddings().weight, trained.get_input_embeddings().weight)
    assert read_config(str(out / "config.yaml")) == read_config(str(config), FAST)


def test_training_in_one_process(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    result = run(*needed(checkpoint, chats, tmp_path), *FAST)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"loaded {checkpoint}"
    # An answer is "It is n", n exclamation marks and the end; 30 tokens are around it.
    learned = sum(len(f"It is {n}") + n + 1 for n in range(8))
    assert f"  8 rows, {8 * 30 + learned} tokens, {learned} learned" in lines
    assert "training: 25 steps on 1 rank, in float32" in lines
    assert any(line.startswith("step 25/25  loss") for line in lines)
    assert any(line.startswith("trained 23,904 parameters in 25 steps: loss ") for line in lines)
    assert lines[-1] == f"everything is in {tmp_path / 'out'}"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.yaml", "last", "metrics.jsonl"}


def test_packed_rows_are_trained_alike(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    losses = []
    for name, options in (("plain", "training.batch_size=8"), ("packed", "data.packing=true")):
        result = run(*needed(checkpoint, chats, tmp_path / name), "training.max_steps=3", options, "--json")
        assert result.exit_code == 0, result.stderr
        [rank] = json.loads(result.stdout)["ranks"]
        losses.append([step["loss"] for step in rank["train"]["steps"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("optimizer.learning_rate=-1",), "optimizer.learning_rate=-1: it must be greater than 0"),
        (("model=", "training.batch_siz=3"), "training.batch_siz: no such key; did you mean training.batch_size?"),
        (("schedule=square",), "schedule.name='square': it must be 'constant', 'linear', 'cosine'"),
        (("training.epochs=1", "training.max_steps=1"), "training: epochs and max_steps both say how long"),
        (("--nproc-per-node", "many"), "'many' is not a valid integer"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(*needed("nowhere", "nothing", tmp_path), *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_refused_training_leaves_no_folder(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    """Whatever it is that is refused, be it at the very end of what is looked at; nor folders above it."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    shutil.copytree(checkpoint, empty := tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    for arguments, told in (
        ((f"data={broken}",), "broken.jsonl"),
        ((f"model={empty}", "model.tokenizer=" + str(checkpoint)), "empty"),
        (("model=nowhere/at-all",), "nowhere/at-all"),
        (("schedule=polynomial", "schedule.options={power: x, what: 3}"), "polynomial"),
        (("model.attn_implementation=none_such",), "none_such"),
    ):
        out = tmp_path / "deep" / "er"
        result = run(*needed(checkpoint, chats, out), *arguments)
        assert result.exit_code == 2
        assert told in result.stderr
        assert not (tmp_path / "deep").exists(), told


def test_nothing_is_asked_for() -> None:
    assert "  model: it must be given\n  data: it must be given\n  output: it must be given" in refusal()


def test_help_shows_a_configuration() -> None:
    assert "model: Qwen/Qwen3-0.6B" in run("--help").stdout


@pytest.mark.parametrize("way", ["told to be offline", "without a network"])
def test_a_model_that_nobody_knows_is_one_error_at_once(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    place = needed("nobody/has-this", chats, tmp_path)
    if way == "without a network":  # transformers would ask six times for each of many files
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    message = refusal(*place)
    assert time.monotonic() - start < 15
    assert (message.count("error:"), message.count("Retry")) == (1, 0)
    assert "nobody/has-this" in message
    assert not (tmp_path / "out").exists()


def test_what_was_trained_is_pushed_and_a_push_that_fails_loses_nothing(
    checkpoint: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = (*needed(checkpoint, chats, tmp_path), "training.max_steps=1", *LORA)
    asked = ("output.push_to_hub=me/mine", "output.private=true")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with stub_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.broken = True
        result = run(*place, *asked, "--json")
        assert result.exit_code == NOT_PUSHED, result.stderr
        told = json.loads(result.stdout)["ranks"][0]["push"]
        assert "error: me/mine: it could not be pushed (" in result.stderr
        assert (told["url"], "403" in told["cause"]) == ("", True)
        hub.broken = False
        result = run(*place, *asked)
        assert result.exit_code == 0, result.stderr
        assert "nothing was left to train after step 1" in result.stdout
        assert f"pushed to {hub.url}/me/mine/commit/1" in result.stdout
    last = tmp_path / "out" / "last"
    assert [(made["name"], "private" in made.values() or made.get("private")) for made in hub.made] == [
        ("mine", True)
    ] * 2
    assert hub.tokens == {"Bearer hf_secret"}
    assert hub.files == {path.name: path.read_bytes() for path in last.iterdir()}
    assert "hf_secret" not in result.stdout + result.stderr


def test_a_push_that_cannot_be_is_refused_before_the_training(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = needed("nowhere", chats, tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "there is no token of the hub here" in refusal(*place, "output.push_to_hub=me/mine")
    assert "say whose it is, as in user/mine" in refusal(*place, "output.push_to_hub=mine")
    assert "output.push_to_hub='me/mi//ne': " in refusal(*place, "output.push_to_hub=me/mi//ne")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(*place, "output.push_to_hub=me/mine")
    assert not (tmp_path / "out").exists()


def test_the_command_is_a_module_too() -> None:
    start = [sys.executable, "-m", "shardwise", "train", "--help"]
    result = subprocess.run(start, check=False, timeout=60, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: shardwise train ")


def test_a_place_that_cannot_be_written_to_is_refused_before_the_training(checkpoint, chats, tmp_path) -> None:
    (tmp_path / "out").touch()
    result = run(*needed(checkpoint, chats, tmp_path), *FAST)
    assert result.exit_code == 2
    assert "out" in result.stderr
    assert "step" not in result.stdout


def test_what_is_saved_may_have_another_dtype(checkpoint, chats, tmp_path) -> None:
    result = run(*needed(checkpoint, chats, tmp_path), "output.dtype=bfloat16", "training.max_steps=1")
    assert result.exit_code == 0, result.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "last").dtype == torch.bfloat16
    assert "F32→BF16" in result.stdout


def test_what_went_on_is_saved_in_the_dtype_it_began_with(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    arguments = (*needed(tmp_path / "model", chats, tmp_path), f"model.tokenizer={checkpoint}")
    for steps in (1, 2):
        result = run(*arguments, f"training.max_steps={steps}", "checkpoints.every=1")
        assert result.exit_code == 0, result.stderr
        last = load_file(tmp_path / "out" / "last" / "model.safetensors")
        assert {tensor.dtype for tensor in last.values()} == {torch.bfloat16}, steps


def test_a_data_file_that_is_not_there(checkpoint: Path, tmp_path: Path) -> None:
    message = refusal(*needed(checkpoint, tmp_path / "none.jsonl", tmp_path))
    assert "none.jsonl: the data cannot be read" in message


def test_malformed_data(checkpoint: Path, tmp_path: Path) -> None:
    data = tiny.write_rows(tmp_path / "chats.jsonl", tiny.chat("Hi", "Ho"), "{")
    arguments = needed(checkpoint, data, tmp_path)
    assert "chats.jsonl: 1 row cannot be used\n  line 2: it is not valid JSON" in refusal(*arguments)
    result = run(*arguments, "data.on_malformed=skip")
    assert result.exit_code == 0, result.stderr
    assert "  left out: malformed, such as it is not valid JSON" in result.stdout
    assert ": 1 row, line 2\n" in result.stdout


def test_a_model_without_a_tokenizer(tmp_path: Path, chats: Path) -> None:
    tiny.model().config.save_pretrained(tmp_path / "model")
    message = refusal(*needed(tmp_path / "model", chats, tmp_path))
    assert "its tokenizer has no vocabulary; is tokenizer.json missing?" in message


def test_a_tokenizer_from_elsewhere(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path / "model")
    arguments = (*needed(tmp_path / "model", chats, tmp_path), "training.max_steps=1", "tuning=lora", "tuning.r=2")
    result = run(*arguments, f"model.tokenizer={checkpoint}", "sharding.precision=float16", "--json")
    assert result.exit_code == 0, result.stderr
    assert "Infinity" not in result.stdout
    [rank] = json.loads(result.stdout)["ranks"]
    assert rank["train"]["remarks"] == []


def test_the_tokenizer_is_of_the_revision_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []
    commit = "c0ffee" * 6 + "beef"
    names: list[object] = []

    def find(name: str, hub: HubOptions) -> str:
        names.append((name, hub.revision))
        return commit

    def look(_name: str, **keywords: object) -> None:
        asked.append(keywords)
        raise OSError("not here")

    monkeypatch.setattr(prepare, "commit_of", find)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", look)
    message = refusal(*needed("org/name", "nothing.jsonl", tmp_path), "model.revision=v1")
    assert "org/name: its tokenizer cannot be loaded (not here)" in message
    assert names == [("org/name", "v1")]
    assert asked == [{"revision": commit, "trust_remote_code": False}]


def test_a_folder_that_is_not_there_is_told_before_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def begun(*_: object, **__: object) -> None:
        raise AssertionError("ranks have been started")

    monkeypatch.setattr(train_cli, "run_ranks", begun)
    message = refusal(*needed(str(tmp_path / "absent"), "nothing.jsonl", tmp_path))
    assert f"{tmp_path / 'absent'}: no such directory" in message


def test_ranks_find_out_together_that_a_folder_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent: no such directory"):
        prepare.load_tokenizer(str(tmp_path / "absent"))


def test_a_tokenizer_of_another_model(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(5)])
    tokenizer.save_pretrained(tmp_path / "model")
    data = tiny.write_rows(tmp_path / "rows.jsonl", {"text": "a <4>"})
    message = refusal(*needed(tmp_path / "model", data, tmp_path))
    assert "makes the token 263 of it, but Qwen3ForCausalLM has embeddings for the tokens 0 to 259 only" in message
    grown = ("model.resize_vocab=tokenizer", "training.max_steps=1")
    result = run(*needed(tmp_path / "model", data, tmp_path), *grown)
    assert result.exit_code == 0, result.stderr
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "last")
    assert trained.config.vocab_size == trained.get_input_embeddings().weight.shape[0] == 264


@pytest.mark.parametrize("name", ["tensorboard", "nonesuch"])
def test_a_tracker_that_is_not_there_is_refused_before_anything_is_read(name: str, tmp_path: Path) -> None:
    message = refusal(*needed("nowhere", "nothing", tmp_path), f"log.trackers=[{name}]")
    assert "log.trackers: " in message
    assert name in message


TUNINGS = {
    "full": (),
    "freeze": ("tuning=freeze", "tuning.trainable_layers=1"),
    "lora": ("tuning=lora", "tuning.r=4", "tuning.target_modules=all-linear", "tuning.lora_dropout=0.0"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("tuning", ["full", "lora", pytest.param("freeze", marks=pytest.mark.slow)])
def test_a_training_that_was_killed_goes_on_on_other_ranks(
    checkpoint: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuning: str
) -> None:
    common = ("optimizer.learning_rate=3e-3", "training.max_steps=6", "schedule=linear", *TUNINGS[tuning], "--json")

    def losses(result: Result) -> list[float]:
        assert result.exit_code == 0, result.stderr
        return [step["loss"] for step in json.loads(result.stdout)["ranks"][0]["train"]["steps"]]

    whole = losses(run(*needed(checkpoint, chats, tmp_path / "whole"), "training.batch_size=2", *common))
    place = needed(checkpoint, chats, tmp_path / "killed")
    tell = StepLog.tell

    def kill(self: StepLog, facts: Event) -> None:
        if isinstance(facts, StepFacts) and facts.step == 4:
            raise KeyboardInterrupt
        tell(self, facts)

    with monkeypatch.context() as patch:
        patch.setattr(StepLog, "tell", kill)
        assert run(*place, "training.batch_size=2", "checkpoints.every=3", *common).exit_code == 130
    out = tmp_path / "killed" / "out"
    assert not (out / "last").exists()
    rest = run(*place, "training.batch_size=1", *common, "--nproc-per-node", 2)
    assert losses(rest) == pytest.approx(whole[3:], rel=1e-5)
    found = json.loads(rest.stdout)["ranks"][1]
    assert (found["train"]["last_step"], found["load"] is None) == (6, tuning != "lora")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in steps if line["kind"] == "checkpoint_restored"] == [3]
    same = [out / "last", tmp_path / "whole" / "out" / "last"]
    if tuning == "lora":
        files = [load_file(folder / "adapter_model.safetensors") for folder in same]
        assert not (out / "last" / "model.safetensors").exists()
        assert len(AutoTokenizer.from_pretrained(out / "last")) == len(AutoTokenizer.from_pretrained(checkpoint))
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), same[0])
        assert any(bool(value.any()) for name, value in model.named_parameters() if "lora_B" in name)
    else:
        files = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in same]
    torch.testing.assert_close(files[0], files[1], rtol=1e-4, atol=1e-5)
    again = run(*place, "checkpoints.resume=never", *common)
    assert again.exit_code == 2
    assert "has a checkpoint of step 6; resume=auto goes on from it" in again.stderr


LORA = ("tuning=lora", "tuning.r=2", "tuning.target_modules=q_proj")


def test_what_a_checkpoint_will_not_go_on_with_is_refused_before_a_model_is_loaded(
    checkpoint: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tiny.write_chats(tmp_path / "others.jsonl", 9)
    place = (*needed(checkpoint, chats, tmp_path), "training.max_steps=1")
    assert run(*place, *LORA).exit_code == 0

    def load(*_: object) -> None:
        raise AssertionError("a model is loaded")

    for name in ("load_model", "build_model"):
        monkeypatch.setattr(session, name, load)
    for arguments, told in (
        ((), "cannot be gone on from:\n  tuning: it holds adapter default of lora, and this run trains full"),
        ((*LORA, "tuning.r=4"), "tuning.r: it was 2, and is 4 now"),
        ((*LORA, "optimizer=sgd"), "optimizer: it was torch.optim.AdamW, and is torch.optim.SGD now"),
        ((*LORA, f"data={others}"), "others.jsonl: the position is one in other data (rows 8 then and 9 now"),
        ((*LORA, "training.seed=1"), "seed 0 then and 1 now"),
    ):
        assert told in refusal(*place, *arguments, "training.max_steps=2")
    with pytest.raises(AssertionError, match="a model is loaded"):
        RUNNER.invoke(train_command, [*map(str, place), *LORA, "training.max_steps=2"], catch_exceptions=False)


@pytest.mark.slow
def test_a_lora_goes_on_on_its_own_base_unless_another_is_allowed(
    checkpoint: Path, chats: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(checkpoint, tmp_path / "base")
    place = (*needed(base, chats, tmp_path), *LORA)
    assert run(*place, "training.max_steps=1").exit_code == 0
    assert "base: nothing differs" in run(*place, "training.max_steps=2").stdout
    file = base / "model.safetensors"
    save_file({name: values * 2 for name, values in load_file(file).items()}, file, metadata={"format": "pt"})
    refused = run(*place, "training.max_steps=3")
    assert refused.exit_code == 2
    assert "belongs to another base model:\n  values: of " in refused.stderr
    assert "checkpoints.on_other_base=ignore" in refused.stderr
    result = run(*place, "training.max_steps=3", "checkpoints.on_other_base=ignore")
    assert result.exit_code == 0, result.stderr
    assert "base: another, as allowed" in result.stdout


def test_what_another_run_has_left_is_not_written_over_unasked(
    checkpoint: Path, chats: Path, tmp_path: Path
) -> None:
    place = (*needed(checkpoint, chats, tmp_path), "training.max_steps=1", "checkpoints.every=null")
    assert run(*place).exit_code == 0
    last = (tmp_path / "out" / "last" / "model.safetensors").read_bytes()
    message = refusal(*place, "training.seed=1")
    assert "there is last/ of another run, and no checkpoint to go on from" in message
    assert (tmp_path / "out" / "last" / "model.safetensors").read_bytes() == last
    assert run(*place).exit_code == 0  # the same again, which begins anew
    assert run(*place, "training.seed=1", "output.overwrite=true").exit_code == 0
    (tmp_path / "out" / "config.yaml").unlink()
    assert "of another run" in refusal(*place)


def test_another_trainings_checkpoint_is_gone_on_from(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    assert (
        run(*needed(checkpoint, chats, tmp_path / "one"), "training.max_steps=2", "checkpoints.every=2").exit_code
        == 0
    )
    place = (*needed(checkpoint, chats, tmp_path / "two"), "training.max_steps=3", "--json")
    result = run(*place, f"checkpoints.resume={tmp_path / 'one' / 'out' / 'checkpoints'}")
    assert result.exit_code == 0, result.stderr
    assert [step["step"] for step in json.loads(result.stdout)["ranks"][0]["train"]["steps"]] == [3]
    message = refusal(*needed(checkpoint, chats, tmp_path / "three"), f"checkpoints.resume={tmp_path / 'none'}")
    assert "there is no complete checkpoint in this folder" in message


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_is_asked_to_stop_says_so(
    checkpoint: Path, chats: Path, tmp_path: Path, ranks: int, number: signal.Signals
) -> None:
    arguments = [*needed(checkpoint, chats, tmp_path), "training.epochs=10000", "log.every=1"]
    start = command(*arguments, f"--nproc-per-node={ranks}")
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("step") for line in process.stdout)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        # A rank that went on would hold the other end of the pipe, and there would be no end to read.
        told = process.stdout.read()
        assert process.wait(timeout=30) == STOPPED, told
    assert "the same command goes on from there" in told


# Where ranks come from

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "nproc_per_node", "launch"),
    [
        ({}, 1, InThisProcess()),
        ({}, 4, Spawned(4)),
        ({"WORLD_SIZE": "8"}, 1, InThisProcess()),
        (TORCHRUN, 1, Launched(rank=3, size=8, local_rank=1)),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            1,
            Launched(rank=3, size=8, local_rank=1, has_generations=True),
        ),
    ],
)
def test_where_ranks_come_from(environment: dict[str, str], nproc_per_node: int, launch: Launch) -> None:
    assert read_launch(environment, nproc_per_node) == launch


@pytest.mark.parametrize(
    ("change", "nproc_per_node", "message"),
    [
        (
            {"MASTER_PORT": "", "LOCAL_RANK": ""},
            1,
            "RANK is in the environment, but LOCAL_RANK, MASTER_PORT is not",
        ),
        ({"RANK": "8"}, 1, "RANK=8 in the environment is not below WORLD_SIZE=8"),
        ({"RANK": "-1"}, 1, "RANK='-1' in the environment is not a number"),
        ({"WORLD_SIZE": "²"}, 1, "WORLD_SIZE='²' in the environment is not a number"),
        ({}, 2, "--nproc-per-node=2, but the ranks have been started already"),
    ],
)
def test_an_environment_that_makes_no_sense(change: dict[str, str], nproc_per_node: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch({**TORCHRUN, **change}, nproc_per_node)
    assert str(caught.value).startswith(message)


def test_huge_pages_are_asked_for_where_they_pay_and_the_user_has_not_decided(monkeypatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    looks: list[bool] = []

    def look(*, pays: bool) -> bool:
        looks.append(pays)
        return pays

    for pays in (True, False):
        monkeypatch.setattr(first_touch, "huge_pages_pay", partial(look, pays=pays))
        assert run_ranks(1, os.environ.get, "THP_MEM_ALLOC_ENABLE", preloaded=()) == ["1" if pays else None]
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert run_ranks(1, os.environ.get, "THP_MEM_ALLOC_ENABLE", preloaded=()) == ["0"]
    assert looks == [True, False]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("given", ["", "glibc.malloc.perturb=0"])
def test_ranks_that_are_started_on_processors_join_what_is_freed(given: str) -> None:
    """glibc reads it when a process begins; what the user has said stays."""
    program = "import os; from shardwise.cli.launch import run_ranks as r; print(r(2, os.getenv, 'GLIBC_TUNABLES'))"
    wanted = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    wanted |= {"GLIBC_TUNABLES": given} if given else {}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=100, capture_output=True, text=True, env=wanted
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([given or "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"] * 2)


def test_where_there_may_be_accelerators_the_heap_is_left_alone(tmp_path: Path) -> None:
    assert launch._joined_at_once(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert not launch._joined_at_once(tmp_path)


@pytest.mark.parametrize(("huge", "pay"), [(0.0002, True), (0.0044, False)])
def test_whether_huge_pages_pay_is_found_by_touching(monkeypatch, huge: float, pay: bool) -> None:
    costs = {Way.HUGE: huge, Way.SMALL: 0.0007}
    touched: list[Way] = []

    def populate(_address: int, _nbytes: int, way: Way) -> float:
        touched.append(way)
        return costs[way]

    monkeypatch.setattr(first_touch, "can_populate", lambda: True)
    monkeypatch.setattr(first_touch, "populate", populate)
    monkeypatch.setattr(first_touch, "begin_small", lambda *_: None)
    assert first_touch.huge_pages_pay() is pay
    assert pay or len(touched) < 20
