"""Adapters of earlier versions of PEFT and transformers, everywhere that adapters are read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.bank.banking import adapter as matrices_of
from tests.bank.on_ranks import bank_of
from tests.merging.adapters import change, save_adapter, tensors_of
from tests.support.files import change_json
from tests.truth import require_equal
from tests.tuning import reference
from transformers import GptOssConfig, Qwen3MoeConfig

import shardwise
from shardwise import ConfigError, ExistingLora
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
    return reference.values_of(shardwise.from_pretrained(base, tuning=ExistingLora(adapter)))


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


READERS = [
    merged,
    continued,
    *(pytest.param(read, marks=pytest.mark.slow) for read in (in_a_bank, from_accelerate)),
]
READERS += [pytest.param(from_a_trainer, marks=pytest.mark.slow)]


@pytest.mark.parametrize("read", READERS)
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


@pytest.mark.parametrize("read", READERS)
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
