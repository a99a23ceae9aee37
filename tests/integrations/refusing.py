"""Functions that ranks run with arguments that for_trainer and ShardwiseTrainer refuse."""

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from tests.integrations.runs import Run, bring_up, launched, rank, rows_of
from tests.models.stepping import replicate
from tests.support.world import said
from tests.training import tiny
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import shardwise
from shardwise.integrations import ShardwiseTrainer, for_trainer


def models(folder: str) -> dict[str, str]:
    """What for_trainer says of each."""
    causal = Path(folder) / "causal"
    live = AutoModelForCausalLM.from_pretrained(causal)
    odd = tiny.model()
    for block in [*odd.model.layers, odd]:
        fully_shard(block)
    meshes = tiny.model()
    fully_shard(meshes.model.layers[0], mesh=dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s")))
    fully_shard(meshes)
    split = tiny.model()
    replicate(split, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    theirs = tiny.model()
    fully_shard(theirs)
    theirs._is_distributed_loading_by_transformers = True
    return {
        "not sharded": said(lambda: for_trainer(live)),
        "compiled": said(lambda: for_trainer(torch.compile(shardwise.from_pretrained(causal)))),
        "on meta": said(lambda: for_trainer(shardwise.from_pretrained(causal, load_weights=False))),
        "not a model of transformers": said(lambda: for_trainer(nn.Linear(2, 2))),
        "several meshes": said(lambda: for_trainer(meshes)),
        "tensor parallel": said(lambda: for_trainer(split)),
        "by transformers": said(lambda: for_trainer(theirs)),
        "by others": said(lambda: for_trainer(odd)),
        "a name": said(lambda: for_trainer("gpt2")),
    }


def marked(folder: str, place: str) -> dict[str, Any]:
    """Attributes of a model that is for the Trainer."""
    where = Path(folder)
    model = shardwise.from_pretrained(
        where / "causal", dtype=torch.float32, tuning=shardwise.ExistingLora(where / "adapter")
    )
    inner = model.get_base_model()
    before = said(lambda: inner.save_pretrained(folder))
    rows = inner.config.vocab_size
    resized = said(lambda: model.resize_token_embeddings(rows + 8))
    model.resize_token_embeddings(rows - 1, pad_to_multiple_of=rows)  # which changes nothing
    gathered = {key: value.full_tensor() for key, value in inner.state_dict().items()}
    inner.save_pretrained(Path(place) / f"gathered{dist.get_rank()}", state_dict=gathered)
    same = for_trainer(model) is model
    opened = model.is_distributed_loading_by_transformers
    model.save_pretrained(place)
    refused = said(lambda: model.save_pretrained(place, push_to_hub=True))
    again = for_trainer(model) is model
    return {
        "same": same and again,
        "opened": opened,
        "refused": refused,
        "refused before": before,
        "resized": resized,
        "tensor parallel": getattr(model, "_tp_size", None),
    }


class _UnderFsdp(Trainer):
    """As where accelerate's configuration asks for FSDP, which it does not heed on CPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = True


class _UnderSequences(Trainer):
    """As where accelerate's configuration asks for context parallelism, which it does not heed on CPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)


def trainers(folder: str, output: str) -> dict[str, str]:
    """What a trainer says of what it is given."""
    kind: Any = type("Mine", (ShardwiseTrainer, Trainer), {})
    raw = shardwise.from_pretrained(Path(folder) / "causal")
    model = shardwise.from_pretrained(Path(folder) / "causal")
    tokens = torch.tensor([[5, 6, 7]])

    def gather() -> None:
        """Leave the root group gathered, as an evaluation does."""
        with torch.no_grad():
            model(input_ids=tokens)

    gather()
    model = for_trainer(model)
    assert all(isinstance(item, DTensor) for item in model.parameters())
    rows = datasets.Dataset.from_list(rows_of(Run(folder))[0])
    given: dict[str, Any] = {"output_dir": output, "use_cpu": True, "report_to": []}

    def made(of: Any = kind, **others: Any) -> Any:
        made_of: dict[str, Any] = {"model": model, "args": TrainingArguments(**given), "train_dataset": rows}
        return of(**made_of | others)

    found = {"alone": said(made)}
    with launched():
        AcceleratorState._reset_state(reset_partial_state=True)
        found["no model"] = said(lambda: made(model="gpt2"))
        found["not for it"] = said(lambda: made(model=raw))
        with mock.patch.object(dist, "is_initialized", return_value=False):
            whole = for_trainer(AutoModelForCausalLM.from_pretrained(Path(folder) / "causal"))
        found["group afterwards"] = said(lambda: made(model=whole))
        found["model_init"] = said(lambda: made(model_init=lambda: model))
        found["peft_config"] = said(lambda: made(peft_config=object()))
        found["fsdp of accelerate"] = said(lambda: made(of=type("Mine", (ShardwiseTrainer, _UnderFsdp), {})))
        uneven = {"even_batches": False}
        found["uneven"] = said(lambda: made(args=TrainingArguments(**given, accelerator_config=uneven)))
        split = {"split_batches": True}
        found["split"] = said(lambda: made(args=TrainingArguments(**given, accelerator_config=split)))
        splits: dict[str, dict[str, Any]] = {
            "tensor parallel": {"parallelism_config": ParallelismConfig(tp_size=2)},
            "shards": {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
            "other shards": {"parallelism_config": ParallelismConfig(dp_shard_size=4)},
            "other ranks": {"parallelism_config": ParallelismConfig(cp_size=4)},
            "smoothing": {"parallelism_config": ParallelismConfig(cp_size=2), "label_smoothing_factor": 0.1},
            "evaluation": {"parallelism_config": ParallelismConfig(cp_size=2), "eval_strategy": "epoch"},
            "rows of a rank": {
                "parallelism_config": ParallelismConfig(cp_size=2),
                "train_sampling_strategy": "batch_rebalance",
            },
        }
        for name, others in splits.items():
            found[name] = said(partial(made, args=TrainingArguments(**given, **others)))
        split = TrainingArguments(**given, parallelism_config=ParallelismConfig(cp_size=2))
        found["sequences of accelerate"] = said(
            partial(made, of=type("Mine", (ShardwiseTrainer, _UnderSequences), {}))
        )
        AcceleratorState._reset_state(reset_partial_state=True)
        classes = bring_up(Run(folder, model="classes"))
        found["classes"] = said(partial(made, model=classes, args=split))
        found["own loss"] = said(partial(made, args=split, compute_loss_func=min))
        found["evaluate"] = said(partial(made(args=split).evaluate, rows))
        model.set_attn_implementation("eager")
        found["eager"] = said(partial(made, args=split))
        model.set_attn_implementation("sdpa")
        AcceleratorState._reset_state(reset_partial_state=True)
        found["fsdp"] = said(lambda: made(args=TrainingArguments(**given, fsdp=True)))
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        for optim in ("adafactor", "adamw_torch"):
            found[optim] = said(made(args=TrainingArguments(**given, optim=optim)).create_optimizer)
        gather()
        gathered = SGD(model.parameters())
        found["gathered"] = said(made(optimizers=(gathered, None)).create_optimizer)
        trainer = made()
        gather()
        groups = trainer.create_optimizer().param_groups
        assert all(isinstance(item, DTensor) for group in groups for item in group["params"])
        failing = mock.Mock(side_effect=OSError("no space") if rank() == 0 else None)
        with mock.patch.object(Trainer, "push_to_hub", failing):
            found["upload"] = said(trainer.push_to_hub)
        # Calls of the first rank fail before the others save. Afterwards all are in the same call again.
        refusing = mock.Mock(side_effect=OSError if rank() == 0 else None)
        kinds = ("OSError", "StorageError: push_to_hub") if rank() == 0 else ("RankMismatchError",) * 2
        with mock.patch("os.makedirs", refusing):
            assert said(trainer.save_model).startswith(kinds[0])
        with mock.patch.object(trainer, "init_hf_repo", refusing):
            assert said(trainer.push_to_hub).startswith(kinds[1])
        trainer.hub_model_id = "me/mine"
        with mock.patch("os.makedirs", refusing):
            assert said(trainer.push_to_hub).startswith(kinds[0])
        found["afterwards"] = said(partial(for_trainer, model))
        tracker = type("WandbCallback", (TrainerCallback,), {"_log_model": mock.Mock(is_enabled=True)})
        trainer.add_callback(type("Mine", (tracker,), {}))
        found["tracker"] = said(trainer.train)
        found["jit"] = said(partial(made, args=TrainingArguments(**given, enable_jit_checkpoint=True)))
        trainer = made(args=TrainingArguments(**given))
        found["asked for"] = str(trainer.args.save_only_model)
        found["other folder"] = said(lambda: trainer.train(resume_from_checkpoint=f"{output}/{rank()}"))
        with mock.patch.dict(os.environ, HOME=output):
            found["home"] = said(lambda: trainer.train(resume_from_checkpoint="~/gone"))
    return found


def of_trl(folder: str, output: str) -> dict[str, str]:
    """What is refused of TRL's trainers."""
    import trl

    from shardwise.options import Classes

    causal = Path(folder) / "causal"
    model = for_trainer(shardwise.from_pretrained(causal))
    apart = for_trainer(
        shardwise.from_pretrained(
            Path(folder) / "untied",
            sharding=shardwise.Sharding(wrap=Classes(names=("Qwen3DecoderLayer", "Linear"))),
        )
    )
    rows = datasets.Dataset.from_list(rows_of(Run(folder, "dpo"))[0])
    given: dict[str, Any] = {"output_dir": output, "use_cpu": True, "bf16": False, "report_to": []}

    def made(name: str, model: Any = model, others: dict[str, Any] | None = None, **arguments: Any) -> str:
        kind: Any = type("Mine", (ShardwiseTrainer, getattr(trl, f"{name}Trainer")), {})
        args = getattr(trl, f"{name}Config")(**given, **arguments)
        return said(
            lambda: kind(
                model=model, args=args, train_dataset=rows, processing_class=tiny.tokenizer(), **(others or {})
            )
        )

    with launched():
        AcceleratorState._reset_state(reset_partial_state=True)
        return {
            "no reference": made("DPO"),
            "reference": made("DPO", others={"ref_model": shardwise.from_pretrained(causal)}),
            "precompute": made("DPO", others={"ref_model": model}, precompute_ref_log_probs=True),
            "grpo": made("GRPO", others={"reward_funcs": len}, beta=0.1),
            "rloo": made("RLOO", others={"reward_funcs": len}, beta=0.1),
            "head apart": made("SFT", model=apart),
            "sequences": made("SFT", parallelism_config=ParallelismConfig(cp_size=2)),
        }
