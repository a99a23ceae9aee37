"""``shardwise train`` and ``shardwise plan``: fine-tuning by TRL's trainers, and estimates."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.launch import print_report, run_ranks, to_json
from shardwise.cli.progress import importing, signs_of_life
from shardwise.core.errors import ConfigError, require_version
from shardwise.core.phases import phase
from shardwise.files.urls import HubOptions, is_local, local_path

if TYPE_CHECKING:
    from shardwise.core.estimate_report import Estimate
    from shardwise.loading.estimate import PlanOptions
    from shardwise.training.run_config import RunConfig
    from shardwise.training.run_outcome import TrlOutcome


STOPPED = 75
"""Exit code (EX_TEMPFAIL) if a signal ended the training with its state saved: call again to resume."""

SOME_FAILED = 3
"""Exit code if some of many LoRAs failed, and the others were trained."""


class _TrainCommand(click.Command):
    """A command whose help ends with the keys that TRL does not have."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        from shardwise.training.arguments import ShardwiseArguments

        rows = [(key.name, key.metadata["help"].replace("`", "")) for key in fields(ShardwiseArguments)]
        with formatter.section("Keys beside those of TRL"):
            formatter.write_dl(rows)


@click.command("train", cls=_TrainCommand, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, metavar="[METHOD] [CONFIG.yaml] [--KEY VALUE]...", type=click.UNPROCESSED)
@click.option("--nproc-per-node", type=click.IntRange(min=1), help="Ranks to start on this machine.  [default: 1]")
@click.option("--accelerate-config", metavar="FILE", help="Shard according to a config file of accelerate.")
@click.option("--check", is_flag=True, help="Check the configuration, and end.")
@click.option("--strict", is_flag=True, help="Refuse former keys, instead of translating them.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object, all else to stderr.")
def train_command(
    arguments: Sequence[str],
    *,
    nproc_per_node: int | None,
    accelerate_config: str | None,
    check: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Fine-tune a causal language model with TRL, from a YAML file of TRL's keys and --KEY VALUE overrides.

    METHOD is sft (the default), dpo, kto, grpo, rloo, distillation, reward, orpo, cpo, tpo or gmpo. Keys are
    described in docs/train.md. Files for several models are in recipes/. Many LoRAs: adapters: and sweep:
    (docs/many_loras.md). Under torchrun, its ranks are used. With --nproc-per-node, ranks are started here.

    \b
    A small config.yaml:
      model_name_or_path: Qwen/Qwen3-0.6B   # a folder, a name on the hub, or a URL
      dataset_name: chats.jsonl             # a file, or a dataset on the hub
      output_dir: out
      assistant_only_loss: true
      learning_rate: 1e-5
      save_steps: 200

    Exit codes: 0 trained; 2 an error; 3 some of many LoRAs failed; 75 stopped by SIGTERM, SIGUSR1 or Ctrl-C with
    its state saved, so that the same command resumes.
    """  # noqa: D301 - click's mark of a paragraph that is not wrapped
    try:
        words = [*arguments, *(("--accelerate_config", accelerate_config) if accelerate_config else ())]
        config = _read_config(words, strict=strict)
        if check:
            click.echo(f"{config.source}: is a valid configuration of {config.method}")
            return
        config = apply_environment(config)
        ranks = nproc_per_node
        if "RANK" not in os.environ:  # no launcher has started the ranks
            ranks = ranks or _num_ranks(config, starts=True)
        outcomes = run_ranks(ranks or 1, run_on_rank, config, as_json, libraries="torch and TRL")
    except KeyboardInterrupt:
        click.echo("interrupted: all ranks have ended. Earlier checkpoints are complete.", err=True)
        sys.exit(130)
    if os.environ.get("RANK", "0") == "0":
        _print_outcome(outcomes[0], as_json=as_json)
    sys.exit(_exit_code(outcomes[0]))


_OLDEST = {"transformers": "5.19", "peft": "0.20", "trl": "1.16"}
"""Versions that a training needs. Those of PEFT and TRL are in ``pyproject.toml``, too."""


def _read_config(arguments: Sequence[str], *, strict: bool = False) -> RunConfig:
    """Read a configuration without importing torch, and print what was translated or left out.

    Raises:
        ShardwiseError: the configuration is invalid, its local model does not exist, or a library is too old.
    """
    if find_spec("trl") is None:  # does not import it
        raise ConfigError("trl: is not installed. Run pip install 'shardwise[train]'")
    for library, oldest in _OLDEST.items():
        require_version(library, oldest)
    from shardwise.training.adapters_config import read_adapters
    from shardwise.training.run_config import read_run_config

    config = read_run_config(arguments, strict=strict)
    # All ranks of a launcher read the configuration. The first one prints.
    if os.environ.get("RANK", "0") == "0":
        for note in config.notes:
            click.echo(note, err=True)
    # Expanded for its errors only. Each rank expands the adapters again.
    if config.own.has_adapters:
        read_adapters(config)
    model = str(config.values.get("model_name_or_path", ""))
    if model and is_local(model) and "RANK" not in os.environ:  # ranks of a launcher check it together
        local_path(model, HubOptions())
    return config


def _num_ranks(config: RunConfig, *, starts: bool = False) -> int | None:
    """Return the number of ranks of a configuration, as for ``trl sft``, or None if it has none.

    Raises:
        ConfigError: ``accelerate_config`` has no valid one, or, with ``starts``, is for several machines.
    """
    from shardwise.training.run_config import read_yaml, trl_accelerate_config

    file = config.own.accelerate_config
    if config.own.num_processes or file is None:
        return config.own.num_processes
    # accelerate counts the processes of all machines. Those of a single one can be started here.
    values = read_yaml(trl_accelerate_config(file))
    if starts and (machines := values.get("num_machines") or 1) != 1:
        raise ConfigError(f"num_machines: {machines} in {file}. Start the ranks by torchrun on each machine")
    count = str(values.get("num_processes") or 1)
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"num_processes: {count} in {file}. Write a number of ranks, 1 or more")
    return int(count)


def apply_environment(config: RunConfig) -> RunConfig:
    """Set ``env`` in the environment, and move ``hub_token`` to it, because the Trainer saves arguments.

    Before ranks start and torch is imported: both read the environment.
    """
    os.environ.update({name: str(value) for name, value in (config.own.env or {}).items()})
    values = dict(config.values)
    if token := values.pop("hub_token", None):
        os.environ["HF_TOKEN"] = str(token)
    return replace(config, values=values)


def run_on_rank(config: RunConfig, prints_to_stderr: bool = False) -> TrlOutcome:  # noqa: FBT001, FBT002 - by position
    """Train on one rank, with torchrun's environment variables, which accelerate reads. Collective: yes.

    With ``prints_to_stderr``, the Trainer's log is not written to stdout, which is for the outcome.
    """
    from shardwise.ranks.processes import get_rank_and_size, return_freed_blocks

    # First, because it applies to blocks that are allocated afterwards.
    return_freed_blocks(os.environ)
    rank, size = get_rank_and_size()
    if size:
        # Ranks that are started here are all on this machine, so the local rank is the rank.
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)):
            os.environ.setdefault(name, str(value))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    silence_libraries(rank)
    stdout = redirect_stdout(sys.stderr) if prints_to_stderr else nullcontext()
    with stdout, nullcontext() if rank else signs_of_life("train"):
        with phase("import TRL"):
            from shardwise.training.train_model import train
        if config.own.has_adapters:
            from shardwise.training.train_adapters import train_adapters

            return train_adapters(config, local_rank)
        return train(config, local_rank)


def silence_libraries(rank: int) -> None:
    """Silence warnings of libraries in this process that are about what shardwise does, or are those of rank 0."""
    # TRL and PEFT use names that transformers has replaced. Other names that will go are shown by the first rank.
    warnings.filterwarnings("ignore", "" if rank else r"`\w*gradient_checkpointing\w*` is depr", FutureWarning)
    logging.getLogger("transformers.trainer_utils").addFilter(has_other_differences)


def has_other_differences(record: logging.LogRecord) -> bool:
    """Return False if the Trainer's warning on resuming reports only a different per-device batch size.

    That size depends on the number of ranks, and the rows of a step have been compared already.
    """
    _, *differences = record.getMessage().splitlines() or [""]
    return [text.partition(":")[0].strip() for text in differences] != ["per_device_train_batch_size"]


def _exit_code(outcome: TrlOutcome) -> int:
    if outcome.has_stopped:
        return STOPPED
    return SOME_FAILED if any("failure" in one for one in outcome.metrics.values() if isinstance(one, dict)) else 0


def _print_outcome(outcome: TrlOutcome, *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(asdict(outcome)))
        return
    stopped = f"stopped after {outcome.steps} steps. Run the same command to resume"
    click.echo("\n".join([*outcome.summary, stopped if outcome.has_stopped else f"saved in {outcome.output_dir}"]))


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]...")
@click.option("--ranks", type=click.IntRange(1), help="Number of processes.")
@click.option("--dtype", help="auto, float32, bfloat16, ...  [default: auto]")
@click.option(
    "--mesh", metavar="AXES", help="Axes and sizes, such as replicate=2,shard=4.  [default: all ranks shard]"
)
@click.option("--device", default="cuda", show_default=True, help="Device of the shards: cuda, cpu, ...")
@click.option(
    "--tuning",
    metavar="HOW",
    help="What is trained: full, freeze=N[,modules=A+B][,extra=A+B], lora=R[,alpha=X][,targets=A+B], or a folder "
    "with an adapter of PEFT.",
)
@click.option(
    "--batch",
    "per_device_train_batch_size",
    type=click.IntRange(1),
    metavar="ROWS",
    help="Rows of a forward pass, with --tuning.",
)
@click.option(
    "--seq", "max_length", type=click.IntRange(2), metavar="TOKENS", help="Tokens of a row, with --tuning."
)
@click.option("--optim", help="Optimizer, by the Trainer's name.  [default: adamw_torch_fused]")
@click.option(
    "--memory", metavar="SIZE", help="Memory of each rank, such as 80GiB. Exit with 2 if it is too small."
)
@click.option("--revision", help="Branch, tag or commit of a hub repository.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code of the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    *,
    model: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    device: str,
    memory: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Estimate memory, bytes read and FSDP2 groups for loading or training MODEL, for each rank.

    MODEL is a folder, a repository in the cache of the Hugging Face hub, or a URL. Only its config and the headers
    of its files are read, nothing is downloaded, and no process is started. Or MODEL is the YAML file of a
    training, as for ``shardwise train``, with --KEY VALUE overrides. Exits with 2 if the model cannot be loaded so,
    or does not fit into --memory.
    """
    from shardwise.core.tensors import parse_size

    limit = None if memory is None else parse_size(memory)
    placed: PlanOptions = {"device": device}
    if limit is not None:
        placed["memory_bytes"] = limit
    if model.endswith((".yaml", ".yml")):
        estimate = _estimate_config(model, overrides, ranks, placed, options)
    else:
        estimate = _estimate_model(model, overrides, ranks, {**options, **placed})
    # The report is printed even if the memory is too small.
    if limit is not None and not as_json:
        click.echo(estimate.verdict(limit))
    print_report(estimate, as_json=as_json)
    if limit is not None and estimate.peak_bytes > limit:
        raise ConfigError(f"--memory: the plan {estimate.verdict(limit)}. See docs/out_of_memory.md")


def _estimate_config(
    file: str, overrides: tuple[str, ...], ranks: int | None, placed: PlanOptions, options: dict[str, Any]
) -> Estimate:
    """Plan the training of a configuration. Options that have the names of keys replace those of the file."""
    words = [file, *overrides]
    for name, value in options.items():
        if value and name in ("mesh", "tuning", "revision"):
            raise ConfigError(f"--{name}: is for a model, and {file} is a configuration. Leave it out")
        if value:
            words.append(f"--{name}={value}")
    config = apply_environment(_read_config(words))
    ranks = ranks or _num_ranks(config)
    if ranks is None:
        raise ConfigError("num_processes: is missing. Set it, or give --ranks")
    silence_libraries(0)
    with importing("torch and TRL"):
        from shardwise.training.run_estimate import plan_run
    with signs_of_life("plan"):
        return plan_run(config, ranks, placed)


def _estimate_model(model: str, overrides: tuple[str, ...], ranks: int | None, options: dict[str, Any]) -> Estimate:
    """Plan a load, and a training run if there is a tuning."""
    if overrides:
        raise ConfigError(f"{overrides[0]}: is not an option for a model. See shardwise plan --help")
    if ranks is None:
        raise ConfigError("--ranks: is missing. Give the number of processes")
    keywords = {name: value for name, value in options.items() if value is not None}
    if "tuning" not in keywords and {"per_device_train_batch_size", "max_length"} & keywords.keys():
        raise ConfigError("--batch, --seq: need --tuning. Give that, too")
    if "mesh" in keywords:
        keywords["mesh"] = parse_mesh(keywords["mesh"])
    # Before the import, which takes seconds.
    if is_local(model):
        local_path(model, HubOptions())
    with importing("torch and transformers"):
        from shardwise.loading.estimate import plan
        from shardwise.loading.option_syntax import build_tuning
    keywords["hub"] = HubOptions(revision=keywords.pop("revision", None))
    if "tuning" in keywords:
        keywords["tuning"] = build_tuning(keywords["tuning"])
    with signs_of_life("plan"):
        return plan(model, ranks=ranks, **{"dtype": "auto", **keywords})


def parse_mesh(text: str) -> dict[str, int]:
    """Parse the axes and sizes of ``replicate=2,shard=4``.

    Raises:
        ConfigError: the text has another form, or an axis twice.
    """
    axes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.strip().partition("=")
        if not (name and size.isascii() and size.isdigit()) or name in axes:
            raise ConfigError(
                f"--mesh={text!r}: {item.strip()!r} is not a new AXIS=SIZE. Write replicate=2,shard=4"
            )
        axes[name] = int(size)
    return axes
