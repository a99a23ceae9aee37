"""Models through ``Accelerator.prepare``, its loop, its saves and its launcher: ours, and those it shards."""

import json
import subprocess
import sys
from contextlib import suppress
from inspect import getattr_static

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.integrations import accelerate_errors, accelerate_states, accelerating
from tests.integrations.accelerating import OURS, THEIRS, WAYS
from tests.small_checkpoints import small_qwen3
from tests.support.local_ranks import RankError
from tests.support.world import agreed, require_same_error, run_forked
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import shardwise
from shardwise.core.errors import find_private


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> str:
    return str(zoo.save_original(small_qwen3(), tmp_path_factory.mktemp("qwen3"), max_shard_size="30KB"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> str:
    return str(zoo.save_original(small_qwen3(tie_word_embeddings=True), tmp_path_factory.mktemp("tied")))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    """Two experts, so that on three ranks one holds none of any."""
    sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8, "num_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=8, intermediate_size=8))
    zoo.fill(model)
    return str(zoo.save_original(model, tmp_path_factory.mktemp("mixture")))


ALL_SAME = {"losses": 1e-6, "norms": 1e-6, "weights": 2e-5}


def close(found: dict[str, float]) -> bool:
    return all(found[name] <= limit for name, limit in ALL_SAME.items())


def test_a_model_is_as_in_the_files_in_both_strategies(worlds, qwen3, tied):
    """With memory-efficient loading and without; bit for bit, buffers too."""
    world = worlds(2)
    for way in WAYS:
        assert world.run(accelerating.brought_up, qwen3, *way) == [[], []], way
    assert world.run(accelerating.brought_up, tied, THEIRS, True) == [[], []]


@pytest.mark.parametrize("kind", ["whole", "lora", "classes", "saved modules"])
def test_models_loaded_by_accelerate_are_bitwise_the_same_under_the_switch(worlds, qwen3, tied, kind):
    """Adapters, heads that the files lack, and modules that PEFT copies; in the same groups."""
    assert worlds(2).run(accelerating.brought_up_by_theirs, qwen3, kind) == [([], [])] * 2
    assert worlds(2).run(accelerating.brought_up, qwen3, THEIRS, True, kind) == [[], []]
    if kind != "saved modules":  # of a tied head accelerate itself can make nothing then
        assert worlds(2).run(accelerating.brought_up_by_theirs, tied, kind) == [([], [])] * 2


@pytest.mark.parametrize("way", WAYS)
def test_the_loop_is_that_of_one_process(worlds, qwen3, way):
    """Losses, gradient norms and weights; accumulation, clipping and a schedule; whole, and with LoRAs."""
    kinds = ["whole", "lora", *(["replicated"] if way == (OURS, True) else [])]
    for kind in kinds:
        for found in worlds(2).run(accelerating.trained, qwen3, *way, kind):
            assert close(found), (kind, found)


def test_files_of_every_kind_are_read_by_all_ranks_and_by_none_whole(worlds, tmp_path):
    """Several files, a variant of them, a file of torch's, and ties that are stored twice."""
    kinds: dict[str, dict[str, str]] = {"several": {}, "variant": {"variant": "fp16"}}
    kinds |= {"torch": {}, "torch's": {}, "twice": {}}
    for name, keywords in kinds.items():
        model = small_qwen3(tie_word_embeddings=name == "twice")
        model.save_pretrained(tmp_path / name, max_shard_size="30KB" if name != "torch" else "1GB", **keywords)
    file = tmp_path / "torch" / "model.safetensors"
    torch.save(load_file(file), tmp_path / "torch" / "pytorch_model.bin")
    file.unlink()
    halves = tmp_path / "torch's"
    weight_map = {}
    for number, file in enumerate(sorted(halves.glob("*.safetensors"))):
        state = load_file(file)
        torch.save(state, halves / f"pytorch_model-{number}.bin")
        weight_map |= dict.fromkeys(state, f"pytorch_model-{number}.bin")
        file.unlink()
    (halves / "model.safetensors.index.json").unlink()
    (halves / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map, "metadata": {}}))
    for file in (tmp_path / "twice").glob("*.safetensors*"):
        file.unlink()
    model = small_qwen3(tie_word_embeddings=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert "lm_head.weight" in state
    save_file(state, tmp_path / "twice" / "model.safetensors", {"format": "pt"})
    given = {str(tmp_path / name): keywords for name, keywords in kinds.items()}
    assert worlds(2).run(accelerating.as_stored, given) == [{name: [] for name in given}] * 2


@pytest.mark.slow
def test_a_compiled_model_is_taken(worlds, qwen3):
    for found in worlds(2).run(accelerating.compiled, qwen3):
        assert close(found), found


def test_trained_parameters_are_widened_under_mixed_precision_and_only_then(worlds, qwen3):
    """As accelerate does; with memory-efficient loading and without, and exactly."""
    for efficient, precision in ((True, "bf16"), (False, "bf16"), (True, "no")):
        for alone, ours, differing in worlds(2).run(accelerating.widened, qwen3, precision, efficient):
            assert (ours, differing) == (alone, [])
            assert "model.embed_tokens.weight: torch.bfloat16" in ours
            assert precision == "bf16" or all("bfloat16" in told for told in ours)


def test_settings_that_a_sharded_model_lacks_are_named_by_the_first_rank(worlds, qwen3):
    first, other = worlds(2).run(accelerating.told_of_settings, qwen3)
    assert other == [[], [], [], [], []]
    for [text] in first[:2]:
        settings = [line.split(":")[0].split(",")[0].strip() for line in text.splitlines()[1:]]
        expected = [
            "mixed_precision=bf16",
            "offload to the CPU",
            "activation_checkpointing",
            "dynamo_backend",
        ]
        assert settings == expected
        assert 'dtype="float32" and Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))' in text
    assert first[2] == []
    for [text] in first[3:]:
        assert "dynamo_backend" in text
        assert "activation_checkpointing" not in text


def test_a_mixture_on_more_ranks_than_experts(worlds, mixture):
    """Empty shards have one address, and are parameters of their own nevertheless."""
    for found in worlds(3).run(accelerating.trained, mixture, OURS, True):
        assert close(found), found


@pytest.mark.slow
def test_a_mixture_that_accelerate_shards(worlds, mixture):
    assert worlds(3).run(accelerating.brought_up, mixture, THEIRS, True) == [[]] * 3
    for found in worlds(3).run(accelerating.trained, mixture, THEIRS, True):
        assert close(found), found


@pytest.mark.parametrize(
    ("way", "kind", "form", "sizes"),
    [
        ((OURS, True), "whole", "SHARDED_STATE_DICT", (2, 1)),
        ((OURS, True), "lora", "FULL_STATE_DICT", (2,)),
        ((THEIRS, True), "whole", "FULL_STATE_DICT", (2, 3)),
        pytest.param((THEIRS, True), "lora", "SHARDED_STATE_DICT", (2, 3), marks=pytest.mark.slow),
        pytest.param((OURS, True), "replicated", "SHARDED_STATE_DICT", (3, 1), marks=pytest.mark.slow),
    ],
)
def test_a_state_continues_on_other_ranks(worlds, qwen3, tmp_path, way, kind, form, sizes):
    folder = tmp_path / "state"
    losses = worlds(2).run(accelerate_states.saved, qwen3, str(folder), way, kind, form)[0]
    for size in sizes:
        for differing, rest in worlds(size).run(accelerate_states.resumed, qwen3, str(folder), way, kind):
            assert differing == []
            assert accelerating.furthest(rest, losses[1:]) <= 1e-6


@pytest.mark.slow
def test_a_killed_save_leaves_the_one_before(worlds, qwen3, tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RankError):
        run_forked(2, accelerate_states.killed, qwen3, str(folder))
    assert (folder / "notes.txt").read_text() == "mine"
    for differing, _ in worlds(1).run(accelerate_states.resumed, qwen3, str(folder), (OURS, True), "whole"):
        assert differing == []


def test_states_are_accelerates_own_and_numbered(worlds, qwen3, tmp_path):
    (tmp_path / "both").mkdir()
    assert worlds(2).run(accelerate_states.by_accelerate_alone, qwen3, str(tmp_path / "both")) == [[], []]
    expected = (["checkpoint_1", "checkpoint_2", "checkpoints"], 3)
    assert worlds(2).run(accelerate_states.numbered, qwen3, str(tmp_path / "numbered")) == [expected] * 2


def test_a_rank_that_cannot_write_or_read_is_reported_on_all_and_the_older_state_stays(worlds, qwen3, tmp_path):
    told = agreed(worlds(2), accelerate_states.failing_on_one, qwen3, str(tmp_path / "state"))
    assert all("rank 1" in words and "no room" in words for _, words in told), told


SAID = {
    "sharded in part": (
        "ShardingError",
        "sharded in part: fully_shard was applied to 0, but not to the owners of 1.",
    ),
    "in DDP": ("ShardingError", "wrapped in DistributedDataParallel. Pass the model inside"),
    "sharded by others": ("ShardingError", "parameters are distributed, but not by fully_shard: 0.weight"),
    "sharded on one rank": ("RankMismatchError", "the state of the model (sharded already, or not)"),
    "an optimizer of other parameters": ("ShardingError", "is not the model's. Create the optimizer from"),
    "on meta": ("ShardingError", "tensors are on meta. Call shardwise.load before prepare"),
    "two models": ("ConfigError", "2 models in one call"),
    "placements": ("ConfigError", "device_placement has 2 values, and there are 1 objects"),
    "a plugin of FSDP1": ("ConfigError", "fsdp_version=1"),
    "an optimizer that has stepped": ("ShardingError", "optimizer 0 (AdamW) has stepped already"),
    "a vocabulary resized on meta": ("ShardingError", "model.embed_tokens.weight, lm_head.weight: on meta, in no"),
    "a head initialized on meta": ("ShardingError", "lm_head.weight: on meta, in no file"),
    "a copy of what is on meta": ("ShardingError", "on meta, in no file"),
    "two minds about loading": ("ConfigError", "cpu_ram_efficient_loading=False. Set both, or neither"),
    "a class that is not there": ("ValueError", "Could not find the transformer layer class Qwen3DecoderLayr"),
    "each rank alone": ("ConfigError", "takes each of the 2 ranks for a single process"),
    "ranks that are not counted": ("ConfigError", "accelerate counts 1 processes, and the model"),
    "left on meta on one rank": ("RankMismatchError", "the list of tensors that from_pretrained has left on meta"),
}


def test_unsupported_models_are_refused_on_all_ranks(worlds, qwen3):
    found = worlds(2).run(accelerate_errors.not_taken, qwen3)
    assert found[0].keys() == SAID.keys()
    for name, (kind, words) in SAID.items():
        require_same_error([each[name] for each in found], kind, words)


def test_models_sharded_by_anybody_are_left_alone(worlds, qwen3):
    assert worlds(2).run(accelerate_errors.taken, qwen3) == [[], []]


def patched() -> dict[str, object]:
    from shardwise.integrations.accelerate_patches import _replacements

    return {path: getattr_static(*find_private(path)) for path in _replacements()}


def test_the_switch_puts_everything_back_nested_and_raising():
    before = patched()
    with shardwise.integrations.accelerate() as outer:
        installed = patched()
        assert all(installed[name] is not before[name] for name in before)
        outer.install()
        with suppress(KeyError), shardwise.integrations.accelerate():
            assert patched() == installed
            raise KeyError
        assert patched() == installed, "it stays on until the last one is off"
    assert patched() == before
    outer.remove()
    assert patched() == before


def test_a_door_that_another_program_has_wrapped_stays_theirs_and_passes_on():
    from accelerate import Accelerator

    before = vars(Accelerator)["prepare"]
    with shardwise.integrations.accelerate():
        inside = Accelerator.prepare
        Accelerator.prepare = theirs = lambda self, *args: inside(self, *args)
    try:
        assert vars(Accelerator)["prepare"] is theirs
        with accelerating.launched():
            assert Accelerator(cpu=True).prepare("one", "two") == ("one", "two")
    finally:
        Accelerator.prepare = before


def test_an_accelerate_that_is_not_there_is_one_clear_error():
    code = "import sys; sys.modules['accelerate'] = None; import shardwise; shardwise.integrations.accelerate()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError: accelerate is not installed. Run pip install 'shardwise[accelerate]'" in found.stderr


SCRIPT = """\
import json, sys, torch
from shardwise.integrations import accelerate
accelerate().install()
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

def main(checkpoint, rows, out):
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    is_meta = model.lm_head.weight.is_meta
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(torch.load(rows), batch_size=5)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch in data:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        found = {"losses": losses, "meta": is_meta, "kind": str(accelerator.distributed_type), "names": len(state)}
        json.dump(found, open(out, "w"))

main(*sys.argv[1:])
"""
"""A script that uses shardwise in its first lines only."""


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_launch_runs_a_script_with_the_switch(qwen3, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: 'no'\nnum_machines: 1\n"
        "num_processes: 2\nuse_cpu: false\nmain_training_function: main\nmachine_rank: 0\nrdzv_backend: static\n"
        "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, "
        "fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer, fsdp_state_dict_type: SHARDED_STATE_DICT, "
        "fsdp_cpu_ram_efficient_loading: true, fsdp_reshard_after_forward: true}\n"
    )
    rows = accelerating.rows()[:30]
    torch.save(rows, tmp_path / "rows.pt")
    out = tmp_path / "out.json"
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(tmp_path / "fsdp.yaml"), "--main_process_port", "0"),
        *(str(tmp_path / "script.py"), qwen3),
        *(str(tmp_path / "rows.pt"), str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["meta"]
    assert found["kind"].endswith("FSDP")
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).train()
    assert found["names"] == len(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for batch in rows.split(10):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert accelerating.furthest(found["losses"], expected) <= 1e-6
