"""An adapter goes on on the base it was trained on, on any number of ranks; on another one where that is said."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.checkpoints import bases
from tests.small_checkpoints import small_qwen3
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import shardwise
from shardwise import Checkpointer, TrainState
from shardwise.checkpoints import header
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.state.base_identity import BaseSamples

SAME = "nothing differs; samples of 25 tensors compared"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    zoo.save_original(small_qwen3(), tmp_path / "base")
    return tmp_path / "base"


def replace_values(base: Path, *names: str) -> None:
    """Other values in the same files."""
    tensors = load_file(base / "model.safetensors")
    for name in names or tensors:
        tensors[name] = tensors[name] + 1e-3
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def change_config(base: Path, **settings: object) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | settings))


def identity(run: str) -> dict[str, dict[str, object]]:
    return json.loads(Path(run, "step-1", header.HEADER).read_text())["base"]


def test_a_base_is_the_same_on_any_number_of_ranks(worlds, base, tmp_path):
    one, three = str(tmp_path / "one"), str(tmp_path / "three")
    bases.save(str(base), one)
    worlds(3).run(bases.save, str(base), three)
    assert identity(three) == identity(one)
    assert len(identity(one)["samples"]) == 25
    assert worlds(2).run(bases.restore, str(base), three) == [SAME] * 2
    assert bases.restore(str(base), three) == SAME


def test_experts_that_a_pass_registers_again_are_the_same_base(tmp_path):
    """In another order: PEFT does so with the parameter that has an adapter, and not with the others."""
    sizes = {"hidden_size": 16, "head_dim": 8, "num_hidden_layers": 1, "num_experts": 8, "moe_intermediate_size": 8}
    config = Qwen3MoeConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=2, **sizes)
    zoo.save_original(Qwen3MoeForCausalLM(config), tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    models = [shardwise.from_pretrained(tmp_path / "base", tuning=shardwise.Lora(lora)) for _ in range(2)]
    models[0](input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    orders = [[name for name, _ in model.named_parameters()] for model in models]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    checkpointer = Checkpointer(tmp_path / "run", only=shardwise.options.AdapterOnly())
    checkpointer.save(1, TrainState(models[0]))
    assert checkpointer.restore(TrainState(models[1])).base.startswith("nothing differs")


def test_what_several_ranks_hold_counts_once():
    model = torch.nn.Linear(30, 20, dtype=torch.float16)
    samples = BaseSamples.select(model, collect_tensors(model))
    once = samples.fingerprints()
    other = torch.nn.Linear(30, 20, device="meta")
    nothing = BaseSamples.select(other, collect_tensors(other)).fingerprints()
    before = samples.identity([once])
    assert samples.identity([once, nothing, once]) == before
    assert samples.identity([nothing]).samples == {}
    with torch.no_grad():
        model.bias[7] += 1
    after = samples.identity([samples.fingerprints()])
    assert after.samples["weight"] == before.samples["weight"]
    assert after.samples["bias"] != before.samples["bias"]
    with pytest.raises(shardwise.core.errors.RankMismatchError, match="frozen parameters"):
        samples.identity([once, {("x", (), ()): 1}])


def test_weights_that_were_replaced_in_place_are_refused_on_all_ranks(worlds, base, tmp_path):
    worlds(2).run(bases.save, str(base), str(tmp_path / "run"))
    name = "model.layers.1.mlp.down_proj.weight"
    replace_values(base, name)
    errors = worlds(2).run(bases.restore, str(base), str(tmp_path / "run"))
    assert errors[0] == errors[1]
    kind, text = errors[0]
    assert kind == "KeyMismatchError"
    assert "belongs to another base model" in text
    assert f"values: of 25 tensors sampled, 1 differ: base_model.model.{name}\n" in text
    assert "Load the base that it was trained on, or pass on_other_base=Ignore()" in text
    told = worlds(2).run(bases.restore, str(base), str(tmp_path / "run"), "", ("values",))
    assert all("another, as allowed (of 25 tensors sampled, 1 differ" in text for text in told)
    kind, text = bases.restore(str(base), str(tmp_path / "run"))
    assert (kind, "1 differ" in text) == ("KeyMismatchError", True)


def test_each_checkpoint_has_the_config_as_it_is_then(base, tmp_path):
    model = bases.tuned(str(base))
    checkpointer = Checkpointer(tmp_path, only=shardwise.options.AdapterOnly())
    checkpointer.save(1, TrainState(model))
    model.config.rms_norm_eps = 1e-3
    checkpointer.save(2, TrainState(model))
    assert checkpointer.restore(TrainState(model)).base == SAME


def test_a_base_of_another_config_is_refused(base, tmp_path):
    bases.save(str(base), str(tmp_path / "run"))
    change_config(base, use_cache=False, pad_token_id=1, transformers_version="5.0", attention_dropout=0.5)
    assert bases.restore(str(base), str(tmp_path / "run")) == SAME
    change_config(base, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}, rms_norm_eps=1e-3)
    kind, text = bases.restore(str(base), str(tmp_path / "run"))
    assert kind == "KeyMismatchError"
    assert "config: rms_norm_eps was 1e-06, is 0.001; rope_parameters.rope_theta was 10000.0, is 500.0\n" in text
    assert "values" not in text
    told = bases.restore(str(base), str(tmp_path / "run"), only=("config",))
    assert told.startswith("another, as allowed (rms_norm_eps was 1e-06")
    replace_values(base)
    kind, text = bases.restore(str(base), str(tmp_path / "run"))
    assert "25 differ" in text
    assert "and 20 more" in text
    told = bases.restore(str(base), str(tmp_path / "run"), only=("*",))
    assert "25 differ" in told


def test_a_base_in_another_dtype_is_not_compared_by_values_and_reported(base, tmp_path):
    bases.save(str(base), str(tmp_path / "run"))
    told = bases.restore(str(base), str(tmp_path / "run"), "bfloat16")
    assert "values of 25 not compared: their dtype was float32, and is bfloat16" in told


def test_a_base_in_four_bits_is_one_of_its_own(base, tmp_path):
    bases.save(str(base), str(tmp_path / "run"), "nf4")
    bases.save(str(base), str(tmp_path / "plain"))
    told = bases.restore(str(base), str(tmp_path / "run"), "nf4")
    assert told.startswith("nothing differs; samples of 37 tensors compared")
    for run, how, then, now in (("run", "", "uint8", "float32"), ("plain", "nf4", "float32", "uint8")):
        kind, text = bases.restore(str(base), str(tmp_path / run), how)
        assert kind == "KeyMismatchError"
        assert "shapes: frozen parameters have other names or shapes: " in text
        assert f"layers.0.mlp.gate_proj.weight was {then}, is {now}" in text
    assert "another, as allowed" in bases.restore(str(base), str(tmp_path / "run"), "", ("shapes",))
    bases.save(str(base), str(tmp_path / "nested"), "nested nf4")
    assert bases.restore(str(base), str(tmp_path / "nested"), "nested nf4").startswith("nothing differs")
    replace_values(base)
    kind, text = bases.restore(str(base), str(tmp_path / "run"), "nf4")
    assert (kind, "values: of 37" in text) == ("KeyMismatchError", True)


def test_a_checkpoint_without_the_identity_of_its_base_is_damaged(base, tmp_path):
    bases.save(str(base), str(tmp_path / "run"))
    file = tmp_path / "run" / "step-1" / header.HEADER
    content = json.loads(file.read_text())
    del content["sha256"]
    for identity, message in (
        (None, "has an invalid value: base"),
        ({"config": {}, "samples": {"x": "float32 gg"}}, "has no valid identity of the base model"),
    ):
        content["base"] = identity
        file.write_text(json.dumps({**content, "sha256": header._seal(content)}))
        kind, text = bases.restore(str(base), str(tmp_path / "run"))
        assert kind == "FormatError"
        assert message in text


def test_what_is_frozen_and_stored_comes_from_the_checkpoint(base, tmp_path):
    """A checkpoint of everything takes nothing for granted."""
    tuning = shardwise.Freeze(trainable_layers=1)
    model = shardwise.from_pretrained(base, tuning=tuning)
    Checkpointer(tmp_path / "run").save(1, TrainState(model))
    replace_values(base)
    other = shardwise.from_pretrained(base, tuning=tuning)
    report = Checkpointer(tmp_path / "run").restore(TrainState(other))
    assert report.base == ""
    for name, values in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], values), name


def test_a_permission_that_is_none_is_refused(base, tmp_path):
    bases.save(str(base), str(tmp_path / "run"))
    state = TrainState(bases.tuned(str(base)))
    with pytest.raises(shardwise.core.errors.ConfigError, match="on_other_base"):
        Checkpointer(tmp_path / "run").restore(state, on_other_base=True)
