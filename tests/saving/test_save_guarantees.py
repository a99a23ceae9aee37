"""Promises of docs/save.md beyond the bytes of the files."""

import contextlib
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.small_checkpoints import small_qwen3
from tests.support.files import change_json
from tests.support.own_code import modules_in
from tests.support.world import attempt, require_same_error
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.saving.write import ShardWriter

OPTIONS = shardwise.options.SaveOptions(progress=False)


class Words:
    """A tokenizer of one file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "words.txt").write_text(self.text)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(300, 4)


def save_in_groups(folder: str) -> list[str]:
    """Each rank is a group of its own, with a model of its own; then both are one."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    own = linear()
    with torch.no_grad():
        own.bias.fill_(rank)
    options = shardwise.options.SaveOptions(progress=False, process_group=groups[rank])
    shardwise.save(own, Path(folder, str(rank)), options=options, tokenizer=Words(f"of rank {rank}"))
    report = shardwise.save(linear(), Path(folder, "both"), options=OPTIONS, tokenizer=Words(f"of rank {rank}"))
    again = linear()
    shardwise.load(
        again, Path(folder, str(rank)), options=shardwise.options.LoadOptions(process_group=groups[rank])
    )
    return [Path(folder, where, "words.txt").read_text() for where in (str(rank), "both")] + [
        str(again.bias.tolist()),
        f"{report.rank} of {report.world_size}",
    ]


def test_ranks_are_those_of_the_process_group_and_the_first_ones_tokenizer_counts(worlds, tmp_path):
    assert worlds(2).run(save_in_groups, str(tmp_path)) == [
        ["of rank 0", "of rank 0", str([0.0] * 4), "0 of 2"],
        ["of rank 1", "of rank 0", str([1.0] * 4), "1 of 2"],
    ]


def save_less(folder: str) -> tuple[str, str]:
    """The last rank passes over what it writes last."""
    write, left_out = ShardWriter.write, -dist.get_rank() or None
    with mock.patch.object(ShardWriter, "write", lambda self, requests: write(self, requests[:left_out])):
        return attempt(lambda: shardwise.save(linear(), folder, options=OPTIONS))


def test_bytes_that_no_rank_wrote_are_an_error_before_the_save_counts(worlds, tmp_path):
    shardwise.save(nn.Linear(2, 2), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    told = "the ranks wrote 4,800 of 4,816 bytes: "
    require_same_error(worlds(2).run(save_less, str(tmp_path)), "StorageError", told)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob("*incomplete*"))


def test_the_config_names_the_dtype_that_most_of_the_numbers_have(tmp_path):
    model = small_qwen3().bfloat16()
    model.model.norm.float()  # a few
    shardwise.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    shardwise.save(model.float(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_the_report_has_the_facts(tmp_path):
    model = small_qwen3(tie_word_embeddings=True)
    shardwise.save(model, tmp_path, max_shard_size="30KB")
    older = {path.name for path in tmp_path.glob("model*")} - {"model.fingerprints.json"}
    report = shardwise.save(model, tmp_path, dtype="bfloat16")
    assert report.files == ("model.safetensors",)
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert report.checkpoint_bytes == report.written_bytes == 2 * report.parameters
    assert set(report.cast.values()) == {("F32", "BF16")}
    assert report.dtypes == {"BF16": report.tensors}
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(report.removed) == older
    assert list(report.seconds) == ["plan", "create", "write", "sync", "verify", "commit"]
    for part in ("F32→BF16", "tied        lm_head.weight = model.embed_tokens.weight", "removed"):
        assert part in str(report)


class Around(nn.Module):
    """A model with a part that can be passed alone."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.part(inputs)
        if output.isnan().any():
            raise ValueError("not a number")
        return output


def save_gathered(folder: str) -> list[str]:
    """After an evaluation, whose root group stays gathered in bfloat16. The names of tensors that were rounded."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    averaged, compiled = AveragedModel(small_qwen3()), torch.compile(linear(), backend="eager")
    outer, failed = Around(linear()), Around(linear())
    rows = torch.zeros(1, 300)
    for wrapper, inputs in (
        (averaged, torch.zeros(1, 3, dtype=torch.long)),
        (compiled, rows),
        (outer, rows),
        (failed, rows * torch.nan),
    ):
        fully_shard(wrapper, mp_policy=policy)
        with torch.no_grad(), contextlib.suppress(ValueError):
            wrapper(inputs)
    saved = {"averaged": averaged, "compiled": compiled, "part": outer.part, "after an error": failed.part}
    for name, each in saved.items():
        shardwise.save(each, Path(folder, name), options=OPTIONS)
    rounded: list[str] = []
    for name in saved:
        model = small_qwen3() if name == "averaged" else linear()
        expected = {key: value.clone() for key, value in model.state_dict().items()}
        shardwise.load(model, Path(folder, name))
        rounded += [key for key, value in model.state_dict().items() if not torch.equal(value, expected[key])]
    outer(rows)
    shardwise.set_model_state_dict(outer.part, {"weight": torch.ones(4, 300), "bias": torch.ones(4)})
    assert outer(rows).tolist() == [[1.0] * 4]
    return rounded


def test_a_root_that_stays_gathered_inside_of_which_the_model_is(worlds, tmp_path):
    assert worlds(2).run(save_gathered, str(tmp_path)) == [[], []]


def with_own_code(directory: Path, folder: Path) -> Path:
    """Copy a checkpoint of Qwen3, with a model class of its own in two files."""
    shutil.copytree(directory, folder)
    (folder / "own_parts.py").write_text("from transformers import Qwen3ForCausalLM as Base\n")
    (folder / "modeling_own.py").write_text("from .own_parts import Base\n\n\nclass Own(Base):\n    pass\n")
    places = {"AutoModelForCausalLM": "modeling_own.Own"}
    change_json(folder / "config.json", architectures=["Own"], auto_map=places)
    return folder


def save_own_code(directory: str, folder: str, cache: str) -> None:
    with modules_in(cache):
        model = shardwise.from_pretrained(directory, trust_remote_code=True)
        shardwise.save(model, folder, options=OPTIONS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_code_of_a_model_is_saved(worlds, qwen3, tmp_path, ranks):
    coded, saved, cache = with_own_code(qwen3, tmp_path / "coded"), tmp_path / "saved", str(tmp_path / "modules")
    if ranks == 1:
        save_own_code(str(coded), str(saved), cache)
    else:
        worlds(ranks).run(save_own_code, str(coded), str(saved), cache)
    assert sorted(path.name for path in saved.glob("*.py")) == ["modeling_own.py", "own_parts.py"]
    config = json.loads((saved / "config.json").read_text())
    assert config["auto_map"] == {"AutoModelForCausalLM": "modeling_own.Own"}
    assert config["architectures"] == ["Own"]
    with modules_in(cache):
        assert type(AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)).__name__ == "Own"
        assert type(shardwise.from_pretrained(saved, trust_remote_code=True)).__name__ == "Own"
