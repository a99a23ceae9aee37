"""``shardwise plan``: memory and bytes that a load or a training takes on every rank, from headers alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.report.names import in_bytes
from shardwise.storage.names import HubOptions, is_local, local_place

if TYPE_CHECKING:
    from shardwise.engines.forecasting import PlanOptions
    from shardwise.report.forecast import Forecast


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]...")
@click.option("--ranks", type=click.IntRange(1), help="Number of processes.")
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1), help="Machines they run on.")
@click.option("--dtype", help="auto, float32, bfloat16, ...  [default: auto]")
@click.option("--param-dtype", help="Mixed precision: the dtype in which parameters are gathered.")
@click.option("--mesh", metavar="AXES", help="As in replicate=2,shard=4.  [default: all ranks shard]")
@click.option(
    "--wrap",
    metavar="POLICY",
    help="auto, model_plan, no_split_modules, module_list, whole_model, classes=NAME,NAME, or min-size=ELEMENTS.",
)
@click.option("--device", default="cuda", show_default=True, help="Where the shards will be: cuda, cpu, ...")
@click.option("--offload", is_flag=True, help="Keep shards on the host (CPUOffloadPolicy).")
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
@click.option("--optim", help="Optimizer, as the Trainer names it.  [default: adamw_torch_fused]")
@click.option("--memory", metavar="SIZE", help="Of each rank, as in 80GiB: exit with 2 if it does not suffice.")
@click.option("--revision", help="Of a repository of the Hugging Face hub: branch, tag or commit.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code of the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    *,
    model: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    nodes: int,
    device: str,
    memory: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Forecast what loading or training MODEL takes on each rank: memory, bytes read, groups.

    MODEL is a folder, a repository in the cache of the Hugging Face hub, or a URL. Only its config and the headers
    of its files are read, nothing is downloaded, and no process is started. Or MODEL is the YAML file of a
    training, as for ``shardwise train``, with --KEY VALUE overrides. Exits with 2 if the model cannot be loaded so,
    or does not fit into --memory.
    """
    from shardwise.cli.launch import fail
    from shardwise.tensors.boxes import in_bytes_of

    try:
        limit = None if memory is None else in_bytes_of(memory)
        if model.endswith((".yaml", ".yml")):
            made = _of_config(model, overrides, ranks, nodes, device, given)
        else:
            made = _of_model(model, overrides, ranks, {**given, "nodes": nodes, "device": device})
    except ShardwiseError as error:
        fail(error)
    click.echo(json.dumps(made.to_dict(), indent=2) if as_json else str(made))
    if limit is not None and (lacking := made.lacking_bytes(limit)):
        fail(ConfigError(f"--memory: {in_bytes(limit)} do not suffice, {in_bytes(lacking)} are lacking."))


def _of_config(
    file: str, overrides: tuple[str, ...], ranks: int | None, nodes: int, device: str, given: dict[str, Any]
) -> Forecast:
    """Plan the training that a file describes."""
    if unused := [name for name, value in given.items() if value]:
        raise ConfigError(f"{unused[0]}: its option is for a model. Set it in {file}, or by --KEY VALUE.")
    try:
        from shardwise.training.run_config import read_run_config

        config = read_run_config([file, *overrides])
        from shardwise.training.setup import plan_run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name}: is not installed. Run pip install 'shardwise[train]'.") from error
    return plan_run(config, ranks=ranks, nodes=nodes, device=device)


def _of_model(model: str, overrides: tuple[str, ...], ranks: int | None, given: dict[str, Any]) -> Forecast:
    """Plan a load, and a training or a bank if options describe one."""
    if overrides:
        raise ConfigError(f"{overrides[0]}: is not an option for a model. See shardwise plan --help.")
    if ranks is None:
        raise ConfigError("--ranks: is missing. Give the number of processes.")
    if is_local(model):  # told before seconds of imports
        local_place(model, HubOptions())
    from shardwise.engines.forecasting import plan

    return plan(model, ranks=ranks, **_options(given))


def _options(given: dict[str, Any]) -> PlanOptions:
    from shardwise.engines.forecasting import tuning_named
    from shardwise.engines.sharding import sharding_named

    found = {name: value for name, value in given.items() if value is not None}
    wrap, param_dtype = found.pop("wrap", "auto"), found.pop("param_dtype", None)
    found["sharding"] = sharding_named(wrap, param_dtype=param_dtype, offload=found.pop("offload"))
    found["hub"] = HubOptions(revision=found.pop("revision", None))
    found.setdefault("dtype", "auto")
    if "mesh" in found:
        found["mesh"] = parse_mesh(found["mesh"])
    tuning = found.pop("tuning", None)
    if tuning is None and {"per_device_train_batch_size", "max_length"} & found.keys():
        raise ConfigError("--batch and --seq need --tuning. Give that, too.")
    if tuning is not None:
        found["tuning"] = tuning_named(tuning)
    options: Any = found
    return options  # type: ignore[no-any-return]


def parse_mesh(text: str) -> dict[str, int]:
    """Parse the axes and sizes of ``replicate=2,shard=4``.

    Raises:
        ConfigError: the text has another form, or an axis twice.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not (name and size.isascii() and size.isdigit()) or name in axes:
            raise ConfigError(
                f"--mesh={text!r}: {part.strip()!r} is not a new AXIS=SIZE. Write replicate=2,shard=4."
            )
        axes[name] = int(size)
    return axes
