"""Adapters of earlier versions of PEFT and transformers, everywhere that adapters are read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.bank.banking import matrices_of
from tests.bank.on_ranks import bank_of
from tests.models import reference
from tests.saving.adapters import change, save_adapter, tensors_of
from tests.support.files import change_json
from tests.truth import require_equal
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3MoeConfig,
)

import shardwise
from shardwise import ConfigError, ExistingLora, KeyMismatchError
from shardwise.options import AdapterOnly

EXPERTS, RANK = 4, 3
SQUARE = ["mlp.experts.gate_up_proj"]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
QWEN3_MOE = Qwen3MoeConfig(
    **reference.SIZES | {"num_hidden_layers": 1},
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    tie_word_embeddings=False,
)
GPT_OSS = GptOssConfig(
    **reference.SIZES | {"intermediate_size": 24, "num_hidden_layers": 1},
    num_local_experts=EXPERTS,
    head_dim=12,
    layer_types=["full_attention"],
)
"""Its down_proj is square, and (experts, in, out)."""


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts whose gate_up_proj is square: 2 * 12 by 24."""
    return reference.save_config(tmp_path_factory.mktemp("moe"), QWEN3_MOE)


def exchange(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices for stacked experts as PEFT 0.18 has them: lora_A for the second dimension of the parameter."""
    made: dict[str, torch.Tensor] = {}
    for key in (key for key in tensors if "lora_A" in key):
        other = key.replace("lora_A", "lora_B")
        A, B = tensors[key], tensors[other]
        by_expert = [B[:, expert::EXPERTS].T for expert in range(EXPERTS)]
        by_rank = [A[rank::RANK].T for rank in range(RANK)]
        made[key], made[other] = torch.cat(by_expert), torch.cat(by_rank, dim=1)
    return made


def save_earlier(base: Path, folder: Path, parameters: list[str], version: str | None) -> Path:
    """An adapter in today's layout, and beside it the same in the earlier one, with this ``peft_version``."""
    save_adapter(base, folder / "today", r=RANK, target_parameters=parameters)
    earlier = save_adapter(base, folder / "earlier", r=RANK, target_parameters=parameters)
    change(earlier, exchange)
    change_json(earlier / "adapter_config.json", peft_version=version)
    return earlier


def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    shardwise.merge_adapter(base, adapter, adapter / "merged")
    return tensors_of(adapter / "merged")


def continued(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    with torch.device("meta"):  # the caller's default changes nothing
        model = shardwise.from_pretrained(base, tuning=ExistingLora(adapter))
    return reference.values_of(model)


def in_a_bank(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    bank = bank_of(base, {})
    bank.load("ada", adapter)
    return matrices_of(bank, "ada")


def from_accelerate(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """From the file that accelerate writes, in a folder with the config."""
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "pytorch_model_fsdp.bin")
    model = shardwise.from_pretrained(base, tuning=ExistingLora(adapter.parent / "today"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    shardwise.load_accelerate_model(model, adapter, only=AdapterOnly())
    return reference.values_of(model)


def from_a_trainer(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    (adapter / "trainer_state.json").write_text(json.dumps({"global_step": 1, "epoch": 1.0}))
    model = shardwise.from_pretrained(base, tuning=ExistingLora(adapter.parent / "today"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    shardwise.load_trainer_checkpoint(model, adapter)
    return reference.values_of(model)


Reader = Callable[[Path, Path], dict[str, torch.Tensor]]


OTHERS = [in_a_bank, from_accelerate, from_a_trainer]


@pytest.mark.parametrize(
    "read", [merged, continued, *(pytest.param(read, marks=pytest.mark.slow) for read in OTHERS)]
)
def test_square_matrices_for_experts_are_exchanged_if_peft_was_earlier(
    read: Reader, moe: Path, tmp_path: Path
) -> None:
    earlier = save_earlier(moe, tmp_path, SQUARE, None)
    require_equal(read(moe, earlier), read(moe, tmp_path / "today"))
    change_json(earlier / "adapter_config.json", peft_version="main")
    with pytest.raises(ConfigError, match="stacked experts are square, and PEFT 'main'"):
        read(moe, earlier)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.17.1", "0.18.0.rc0", "0.18.2.dev0@UNKNOWN", "0.19.0", "0.19.1", "0.20.0"])
def test_the_version_decides_on_square_matrices(version: str, moe: Path, tmp_path: Path) -> None:
    earlier = save_earlier(moe, tmp_path, SQUARE, version)
    found, wanted = merged(moe, earlier), merged(moe, tmp_path / "today")
    is_equal = all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert is_equal == (version not in ("0.19.1", "0.20.0"))


@pytest.mark.slow
@pytest.mark.parametrize("read", [merged, continued, *OTHERS])
def test_matrices_that_are_not_square_tell_the_layout_of_all(read: Reader, moe: Path, tmp_path: Path) -> None:
    earlier = save_earlier(moe, tmp_path, BOTH, "0.21.2")
    require_equal(read(moe, earlier), read(moe, tmp_path / "today"))


@pytest.mark.slow
def test_an_exchanged_adapter_is_saved_with_todays_version(moe: Path, tmp_path: Path) -> None:
    earlier = save_earlier(moe, tmp_path, SQUARE, "0.17.1")
    model = shardwise.from_pretrained(moe, tuning=ExistingLora(earlier))
    shardwise.save_adapter(model, tmp_path / "again")
    require_equal(continued(moe, tmp_path / "again"), continued(moe, tmp_path / "today"))


@pytest.mark.slow
@pytest.mark.parametrize("read", [merged, continued])
def test_experts_that_are_stored_in_by_out_are_not_exchanged(read: Reader, tmp_path: Path) -> None:
    base = reference.save_config(tmp_path / "base", GPT_OSS)
    adapter = save_adapter(base, tmp_path / "adapter", r=RANK, target_parameters=["mlp.experts.down_proj"])
    wanted = read(base, adapter)
    change_json(adapter / "adapter_config.json", peft_version="0.18.0")
    require_equal(read(base, adapter), wanted)
    change_json(adapter / "adapter_config.json", peft_version="0.19.0")
    with pytest.raises(ConfigError, match="PEFT '0.19.0', which saved it, does not tell"):
        read(base, adapter)


# Names of earlier versions of transformers


def save_by_names(folder: Path, names: dict[str, str], stored: dict[str, torch.Tensor], **config: Any) -> Path:
    """An adapter of rank 3, and beside it the base's tensors with it merged.

    ``names`` are the adapter's modules by the keys of their weights in the base.
    """
    generator = torch.Generator().manual_seed(3)
    tensors, truth = {}, dict(stored)
    alphas = config.get("alpha_pattern", {})
    for key, former in names.items():
        out, size_in = stored[key].shape
        A, B = (
            torch.rand(RANK, size_in, generator=generator) - 0.5,
            torch.rand(out, RANK, generator=generator) - 0.5,
        )
        tensors[f"base_model.model.{former}.lora_A.weight"] = A
        tensors[f"base_model.model.{former}.lora_B.weight"] = B
        truth[key] = stored[key] + alphas.get(former.rpartition(".")[2], 2 * RANK) / RANK * B @ A
    for name in ("adapter", "truth"):
        (folder / name).mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    save_file(truth, folder / "truth" / "model.safetensors", {"format": "pt"})
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "task_type": "CAUSAL_LM", **config}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(content))
    return folder / "adapter"


def logits_of(folder: Path, **keywords: Any) -> torch.Tensor:
    return reference.logits(shardwise.from_pretrained(folder, **keywords))


def require_merged_and_continued(base: Path, adapter: Path) -> None:
    shutil.copy(base / "config.json", adapter.parent / "truth")
    truth = logits_of(adapter.parent / "truth")
    shardwise.merge_adapter(base, adapter, adapter.parent / "out")
    torch.testing.assert_close(logits_of(adapter.parent / "out"), truth, rtol=1e-4, atol=1e-5)
    model, report = shardwise.from_pretrained(base, tuning=ExistingLora(adapter), output_loading_info=True)
    torch.testing.assert_close(reference.logits(model), truth, rtol=1e-4, atol=1e-5)
    assert any("the adapter has names of another version" in note for note in report.notes)
    shardwise.save_adapter(model, adapter.parent / "again")
    again = logits_of(base, tuning=ExistingLora(adapter.parent / "again"))
    torch.testing.assert_close(again, truth, rtol=1e-4, atol=1e-5)


QWEN2_MOE = Qwen2MoeConfig(
    **reference.SIZES,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=16,
    decoder_sparse_step=2,
    tie_word_embeddings=False,
)
"""A dense layer, and one with a shared expert beside the others."""

SINGLE: dict[str, tuple[Any, list[str]]] = {
    "experts and router": (QWEN3_MOE, ["gate_proj", "up_proj", "down_proj", "q_proj", "gate"]),
    "dense and shared": (QWEN2_MOE, ["gate_proj", "up_proj", "down_proj"]),
    "mixtral": (
        MixtralConfig(**reference.SIZES, num_local_experts=EXPERTS, tie_word_embeddings=False),
        ["w1", "w2", "w3", "gate"],
    ),
}


def single_experts(kind: str, folder: Path, **config: Any) -> tuple[Path, Path]:
    """A base that stores experts one by one, and an adapter of each of them."""
    architecture, targets = SINGLE[kind]
    base = reference.save_config(folder / "base", architecture)
    stored = tensors_of(base)
    names = {key: key.removesuffix(".weight") for key in stored if key.split(".")[-2] in targets}
    return base, save_by_names(folder, names, stored, target_modules=targets, **config)


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "experts and router" else pytest.param(kind, marks=pytest.mark.slow) for kind in SINGLE],
)
def test_single_experts_of_transformers_4(kind: str, tmp_path: Path) -> None:
    require_merged_and_continued(*single_experts(kind, tmp_path, lora_dropout=0.1, alpha_pattern={"gate": 12}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SINGLE)
def test_single_experts_are_merged_into_a_base_that_stores_fused_ones(kind: str, tmp_path: Path) -> None:
    base, adapter = single_experts(kind, tmp_path)
    shardwise.save(shardwise.from_pretrained(base), tmp_path / "fused", names="internal")
    require_merged_and_continued(tmp_path / "fused", adapter)
    assert any(key.endswith("gate_up_proj") for key in tensors_of(tmp_path / "out"))


@pytest.mark.slow
def test_single_experts_that_are_not_all_adapted_are_refused_where_they_are_fused(tmp_path: Path) -> None:
    base, adapter = single_experts("experts and router", tmp_path)
    change(adapter, lambda tensors: {key: value for key, value in tensors.items() if ".up_proj" not in key})
    with pytest.raises(KeyMismatchError, match="gate_up_proj"):
        continued(base, adapter)
    merged(base, adapter)
    shardwise.save(shardwise.from_pretrained(base), tmp_path / "fused", names="internal")
    with pytest.raises(KeyMismatchError, match="gate_up_proj"):
        merged(tmp_path / "fused", adapter)


@pytest.mark.slow
def test_single_experts_in_a_bank(tmp_path: Path) -> None:
    base, adapter = single_experts("experts and router", tmp_path)
    change(adapter, lambda tensors: {key: value for key, value in tensors.items() if "mlp.gate." not in key})
    bank = bank_of(base, {})
    bank.load("ada", adapter)
    found, wanted = matrices_of(bank, "ada"), continued(base, adapter)
    assert found
    for key, value in found.items():
        assert torch.equal(value, wanted[key.replace(".weight", ".default.weight")]), key


def save_vision_language(folder: Path, kind: str) -> tuple[Path, Callable[[str], str]]:
    """A model with a vision tower, and a function from the name of a module to its former one."""
    sizes = {**reference.SIZES, "num_hidden_layers": 1, "head_dim": 12}
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    patches = {"image_size": 8, "patch_size": 4}
    match kind:
        case "llava":
            config: Any = LlavaConfig(
                text_config=LlamaConfig(**sizes), vision_config=CLIPVisionConfig(**tower, **patches)
            )
            before, after = "model.language_model.", "language_model.model."
        case "qwen2_vl":
            rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
            vision = {"depth": 1, "embed_dim": 8, "hidden_size": 24, "num_heads": 2, "patch_size": 4}
            config = Qwen2VLConfig(text_config={**sizes, "rope_parameters": rope}, vision_config=vision)
            before, after = "model.language_model.", "model."
        case _:
            config = Gemma3Config(text_config=sizes, vision_config={**tower, **patches}, mm_tokens_per_image=4)
            before, after = "model.language_model.", "model."
    torch.manual_seed(0)
    with zoo.silenced():
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder, lambda name: name.replace(before, after)


@pytest.mark.parametrize(
    "kind", ["qwen2_vl", *(pytest.param(k, marks=pytest.mark.slow) for k in ("llava", "text"))]
)
def test_former_names_of_vision_language_models(kind: str, tmp_path: Path) -> None:
    """Those of LLaVA and Qwen2-VL before transformers 4.52, and of a text model in the whole model of Gemma 3."""
    base, former = save_vision_language(tmp_path / "base", kind)
    stored = tensors_of(base)
    modules = dict(shardwise.from_pretrained(base).named_modules())
    adapted = [name for name in modules if "language_model" in name and name.endswith("q_proj")]
    ends = {name: f"{name.rpartition('layers.')[2]}.weight" for name in adapted}
    by_key = {
        key: former(name) for name, end in ends.items() for key in stored if key.endswith(end) and "vis" not in key
    }
    adapter = save_by_names(
        tmp_path, by_key, stored, target_modules=["q_proj"], rank_pattern={former(adapted[0]): RANK}
    )
    require_merged_and_continued(base, adapter)


@pytest.mark.slow
def test_ranks_and_alphas_of_stacked_experts_of_a_text_model(tmp_path: Path) -> None:
    specimen = zoo.Specimen("", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "vision-language")
    base = zoo.save_original(zoo.build(specimen), tmp_path / "base")
    patterns = {"alpha_pattern": {"experts.gate_up_proj": 40}, "rank_pattern": {"experts.down_proj": 2}}
    save_adapter(base, tmp_path / "text", target_modules=["q_proj"], target_parameters=BOTH, **patterns)
    shutil.copytree(tmp_path / "text", tmp_path / "today")
    today = {
        key.replace(".layers.", ".language_model.layers."): value
        for key, value in tensors_of(tmp_path / "text").items()
    }
    change(tmp_path / "today", lambda _: today)
    first, second = (logits_of(base, tuning=ExistingLora(tmp_path / name)) for name in ("today", "text"))
    torch.testing.assert_close(first, second)
