"""A LoRA on a base in four bits in TRL's SFTTrainer, as bitsandbytes has it installed."""

from pathlib import Path

import torch
from tests.peers import use_peers


def trained(folder: str, output: str) -> dict[str, object]:
    """Losses of some steps by the trainer, and by hand."""
    use_peers("bitsandbytes")
    from peft import LoraConfig
    from transformers import Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    import shardwise
    from shardwise.integrations.trainer_marks import for_trainer
    from shardwise.options import Nf4

    rows = [{"input_ids": [(3 * at + row) % 90 for at in range(12)]} for row in range(8)]
    losses: dict[str, object] = {}
    for kind, trainer_class in (("Trainer", Trainer), ("SFTTrainer", SFTTrainer)):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = shardwise.from_pretrained(
            folder, quantization=Nf4(), dtype=torch.float32, tuning=shardwise.Lora(config)
        )
        arguments = {
            "output_dir": str(Path(output, kind)),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
        }
        data = [row | {"labels": row["input_ids"]} for row in rows]
        if kind == "SFTTrainer":
            from datasets import Dataset

            made = trainer_class(
                model=for_trainer(model),
                args=SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True}),
                train_dataset=Dataset.from_list(rows),
                processing_class=_tokenizer(),
            )
        else:
            made = trainer_class(model=for_trainer(model), args=TrainingArguments(**arguments), train_dataset=data)
        made.train()
        losses[kind] = [line["loss"] for line in made.state.log_history if "loss" in line]
        dtypes = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
        losses[f"{kind}'s dtypes"] = sorted(dtypes)
    return losses


def _tokenizer():
    from tests.training import tiny

    return tiny.tokenizer()
