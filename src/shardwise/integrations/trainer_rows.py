"""The rows that a training of the Trainer reads, in which a checkpoint has a position.

The position is a number of steps. It is the same row only if steps have as many rows, the rows are the same, and
their order does not depend on how they are divided among ranks and workers. A checkpoint records all three.
"""

from pathlib import Path
from typing import Any

from shardwise.checkpoints.trainer_folders import MODEL_ALONE, TrainerHeader
from shardwise.core.errors import ConfigError, KeyMismatchError
from shardwise.integrations import trainer_compat as compat


def require_resumable(saved: TrainerHeader, current: TrainerHeader, args: Any, source: Path) -> None:
    """Compare a checkpoint with the training that resumes it.

    Args:
        saved: header of the checkpoint.
        current: header that a checkpoint of the training would have.
        args: arguments of the Trainer.
        source: folder of the checkpoint, for messages.

    Raises:
        KeyMismatchError: the checkpoint is of another tuning.
        ConfigError: its position in the data cannot be restored. Never with ``ignore_data_skip``.
    """
    what = f"resume_from_checkpoint={str(source)!r}"
    if saved.holds not in (current.holds, MODEL_ALONE):
        raise KeyMismatchError(
            f"{what}: holds the state of {saved.holds}, and this training has {current.holds}. Resume it with the "
            "tuning that it was saved with (Full, Freeze, Lora, and the adapter's name)"
        )
    if args.ignore_data_skip:
        return
    if current.rows_per_step != saved.rows_per_step:
        raise ConfigError(
            f"{what}: was saved with {saved.rows_per_step} rows in a step, and this training has "
            f"{current.rows_per_step} (per_device_train_batch_size * gradient_accumulation_steps * ranks; it was "
            f"saved by {saved.world_size} ranks), so that its position in the data cannot be restored. Keep the "
            "number of rows in a step, or pass ignore_data_skip=True"
        )
    if args.dataloader_num_workers > 1 and not getattr(args, "dataloader_in_order", True):
        raise ConfigError(
            f"{what}: with dataloader_in_order=False rows come in any order, so that a position in the data cannot "
            "be restored. Leave it out, or pass ignore_data_skip=True"
        )
    if saved.order not in (None, current.order):
        raise ConfigError(
            f"{what}: was saved with rows in the order of {saved.order or 'any ranks'}, and this training has that "
            f"of {current.order or 'any ranks'}, so that its position in the data cannot be restored. Keep these "
            "settings and the number of ranks, or pass ignore_data_skip=True"
        )
    if saved.rows not in (None, current.rows):
        raise ConfigError(
            f"{what}: was saved by a training on {saved.rows}, and this one is on {current.rows}, so that its "
            "position in the data cannot be restored. Keep the rows and the seed, or pass ignore_data_skip=True"
        )


def describe_rows(args: Any, dataset: Any) -> str:
    """Return the number of rows, if it is known, and the seeds that they are shuffled with."""
    rows, is_shuffled = "a stream", False
    if compat.has_length(dataset):
        rows, is_shuffled = f"{len(dataset)} rows", args.train_sampling_strategy != "sequential"
    if not is_shuffled and not getattr(args, "shuffle_dataset", False):
        return rows
    # The Trainer's samplers take data_seed if it is there, and TRL's always seed.
    seeds = "" if args.data_seed is None else f" and data_seed {args.data_seed}"
    return f"{rows} with seed {args.seed}{seeds}"


def describe_order(args: Any, dataset: Any, rows_per_step: int) -> str:
    """Return the settings and ranks on which the order of rows depends, "" if it does not."""
    batch = f"per_device_train_batch_size={args.train_batch_size}"
    settings = []
    if args.dataloader_drop_last:  # of the last batch of all ranks, so that it changes the steps of an epoch
        settings.append(f"dataloader_drop_last with {batch}")
    if compat.has_length(dataset):
        if args.train_sampling_strategy == "group_by_length":
            settings.append("train_sampling_strategy=group_by_length")
    elif args.dataloader_num_workers > 1:  # each reads batches of its own files
        settings.append(f"dataloader_num_workers={args.dataloader_num_workers} with {batch}")
    # With cp_size several ranks have the same rows.
    ranks = rows_per_step // (args.train_batch_size * args.gradient_accumulation_steps)
    described = [f"{', '.join(settings)} on {ranks} ranks"] if settings else []
    # TRL takes so many answers at once, and repeats their prompts. By default they are those of a step.
    num_answers = getattr(args, "generation_batch_size", None)
    if num_answers not in (None, rows_per_step):
        described.append(f"generation_batch_size={num_answers}")
    return " and ".join(described)
