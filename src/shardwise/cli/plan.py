"""``shardwise plan``: what a load will take on every rank, from the headers alone."""

from __future__ import annotations

import json

import click

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.storage.hub import HubOptions


@click.command("plan")
@click.argument("model")
@click.option("--ranks", required=True, type=click.IntRange(1), help="Processes the model will be loaded on.")
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1), help="Machines they will run on.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, ...")
@click.option("--param-dtype", help="Mixed precision: the dtype in which parameters are gathered.")
@click.option("--mesh", metavar="AXES", help="As in replicate=2,shard=4.  [default: all ranks shard]")
@click.option(
    "--wrap",
    default="auto",
    show_default=True,
    metavar="POLICY",
    help="auto, model-plan, no-split, module-lists, whole, classes=NAME,NAME, or min-size=ELEMENTS.",
)
@click.option("--device", default="cuda", show_default=True, help="Where the shards will be: cuda, cpu, ...")
@click.option("--offload", is_flag=True, help="Shards are kept on the host (CPUOffloadPolicy).")
@click.option(
    "--tuning",
    metavar="HOW",
    help="What is trained: full, freeze=N[,modules=A+B][,extra=A+B], lora=R[,alpha=X][,targets=A+B], or a folder "
    "with an adapter of PEFT's. Tells what training takes as well.",
)
@click.option(
    "--tenants",
    type=click.IntRange(1),
    metavar="N",
    help="Adapters of an AdapterBank, each as --rank or --tuning lora=... says. Tells what the bank takes.",
)
@click.option("--rank", type=click.IntRange(1), metavar="R", help="Of each tenant's LoRA, on all linear layers.")
@click.option(
    "--tokens-per-pass",
    type=click.IntRange(1),
    help="Of all tenants, on one rank, padding included.  [default: 4096]",
)
@click.option("--resize-vocab", type=click.IntRange(1), help="Tokens the model is to have.")
@click.option("--budget-bytes", type=click.IntRange(4096), help="Host memory for staging.  [default: 256 MiB]")
@click.option("--revision", help="Of a repository of the Hugging Face hub: branch, tag or commit.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that the checkpoint brings along.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def plan_command(
    model: str,
    *,
    ranks: int,
    nodes: int,
    dtype: str,
    param_dtype: str | None,
    mesh: str | None,
    wrap: str,
    device: str,
    offload: bool,
    tuning: str | None,
    tenants: int | None,
    rank: int | None,
    tokens_per_pass: int | None,
    resize_vocab: int | None,
    budget_bytes: int | None,
    revision: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Tell what loading MODEL on N ranks takes: memory, bytes, files, groups, experts.

    MODEL is a folder, the name of a repository that is in the cache of the Hugging Face hub, or a URL. Only its
    config and the headers of its files are read, nothing is downloaded, and no process is started. Exits with 2
    when the model cannot be loaded so.
    """
    from shardwise.cli.launch import fail
    from shardwise.engines.forecasting import PlanOptions, sharding_named
    from shardwise.engines.tenant_forecasts import tenants_named
    from shardwise.engines.tuning_arguments import tuning_named
    from shardwise.verbs.plan import plan

    try:
        options: PlanOptions = {
            "dtype": dtype,
            "nodes": nodes,
            "device": device,
            "sharding": sharding_named(wrap, param_dtype=param_dtype, offload=offload),
            "hub": HubOptions(revision=revision),
            "trust_remote_code": trust_remote_code,
        }
        if mesh is not None:
            options["mesh"] = parse_mesh(mesh)
        if tenants is not None:
            options["tenants"] = tenants_named(tenants, rank=rank, tuning=tuning)
        elif rank is not None:
            raise ConfigError("--rank is of tenants; give --tenants N, or --tuning lora=R for one LoRA")
        elif tuning is not None:
            options["tuning"] = tuning_named(tuning)
        if tokens_per_pass is not None:
            options["tokens_per_pass"] = tokens_per_pass
        if resize_vocab is not None:
            options["resize_vocab"] = resize_vocab
        if budget_bytes is not None:
            options["budget_bytes"] = budget_bytes
        forecast = plan(model, ranks=ranks, **options)
    except ShardwiseError as error:
        fail(error)
    click.echo(json.dumps(forecast.to_dict(), indent=2) if as_json else str(forecast))


def parse_mesh(text: str) -> dict[str, int]:
    """The axes and sizes of ``replicate=2,shard=4``.

    Raises:
        ConfigError: the text has another form, or an axis twice.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not (name and equals and size.isascii() and size.isdigit()):
            raise ConfigError(f"--mesh={text!r}: {part.strip()!r} is not AXIS=SIZE, as in replicate=2,shard=4")
        if name in axes:
            raise ConfigError(f"--mesh={text!r} has the axis {name} twice; give every axis one size")
        axes[name] = int(size)
    return axes
