"""``shardwise plan``: what a load, or a whole training, will take on every rank, from the headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.storage.names import HubOptions, is_local, local_place

if TYPE_CHECKING:
    from shardwise.engines.plan_options import PlanOptions
    from shardwise.report.forecast import Forecast
    from shardwise.report.training_plan import TrainingPlan


@click.command("plan")
@click.argument("model")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
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
@click.option("--batch", type=click.IntRange(1), metavar="ROWS", help="Of a training: rows of a forward pass.")
@click.option("--seq", type=click.IntRange(2), metavar="TOKENS", help="Of a training: tokens of a row.")
@click.option("--memory", metavar="SIZE", help="Of each rank, as in 24GiB: tells the largest batch that fits.")
@click.option("--tflops", type=click.FloatRange(0, min_open=True), help="TFLOP/s that a rank computes at.")
@click.option("--read-rate", metavar="SIZE", help="What a machine reads in a second, as in 2GB; or measured.")
@click.option("--resize-vocab", type=click.IntRange(1), help="Tokens the model is to have.")
@click.option("--budget-bytes", type=click.IntRange(4096), help="Host memory for staging.  [default: 256 MiB]")
@click.option("--revision", help="Of a repository of the Hugging Face hub: branch, tag or commit.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that the checkpoint brings along.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def plan_command(*, as_json: bool, **said: Any) -> None:
    """Tell what loading MODEL on N ranks takes: memory, bytes, files, groups, experts.

    MODEL is a folder, the name of a repository that is in the cache of the Hugging Face hub, or a URL. Only its
    config and the headers of its files are read, nothing is downloaded, and no process is started. Exits with 2
    when the model cannot be loaded so.

    Where MODEL is the YAML file of a training, as of ``shardwise train``, with KEY=VALUE overrides, or where
    --batch and --seq are given, it tells what the whole training takes, and exits with 2 where that does not fit
    into --memory.
    """
    from shardwise.cli.launch import fail

    try:
        made = _planned(PlanAsked(**said))
    except ShardwiseError as error:
        fail(error)
    click.echo(json.dumps(made.to_dict(), indent=2) if as_json else str(made))
    refusal = getattr(getattr(made, "room", None), "refusal", "")
    if refusal:
        fail(ConfigError(refusal))


@dataclass(frozen=True, slots=True)
class PlanAsked:
    """What the command line says; None where it says nothing."""

    model: str
    overrides: Sequence[str]
    ranks: int
    nodes: int
    dtype: str
    param_dtype: str | None
    mesh: str | None
    wrap: str
    device: str
    offload: bool
    tuning: str | None
    tenants: int | None
    rank: int | None
    tokens_per_pass: int | None
    batch: int | None
    seq: int | None
    memory: str | None
    tflops: float | None
    read_rate: str | None
    resize_vocab: int | None
    budget_bytes: int | None
    revision: str | None
    trust_remote_code: bool

    @property
    def place(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "nodes": self.nodes, "device": self.device}


def _planned(said: PlanAsked) -> Forecast | TrainingPlan:
    """The plan that is asked for: of a file, of a training by options, or of a load.

    Raises:
        ShardwiseError: the model cannot be loaded so, or options contradict each other.
    """
    if is_local(said.model) and not said.model.endswith(
        (".yaml", ".yml")
    ):  # else it is told after seconds of imports
        local_place(said.model, HubOptions())
    from shardwise.verbs.plan import plan

    about = _about_training(said)
    options = _load_options(said)
    if said.model.endswith((".yaml", ".yml")):
        others = {"--batch": said.batch, "--seq": said.seq, "--tuning": said.tuning, "--tenants": said.tenants}
        _require_unsaid(others)
        return _of_config(said, about)
    if said.overrides:
        first = said.overrides[0]
        raise ConfigError(f"{first!r}: overrides are of a training's configuration; give its .yaml file")
    if said.batch is not None or said.seq is not None:
        _require_unsaid({"--tenants": said.tenants})
        return _of_step(said, options, about)
    if about:
        raise ConfigError("--memory, --tflops and --read-rate are of a training; give --seq (and --batch), too")
    return plan(said.model, ranks=said.ranks, **options)


def _load_options(said: PlanAsked) -> PlanOptions:
    """What is said of the load, and of what is tuned."""
    from shardwise.engines.sharding import sharding_named
    from shardwise.engines.tenant_forecasts import tenants_named
    from shardwise.engines.tuning_arguments import tuning_named

    options: PlanOptions = {
        "dtype": said.dtype,
        "nodes": said.nodes,
        "device": said.device,
        "sharding": sharding_named(said.wrap, param_dtype=said.param_dtype, offload=said.offload),
        "hub": HubOptions(revision=said.revision),
        "trust_remote_code": said.trust_remote_code,
    }
    if said.mesh is not None:
        options["mesh"] = parse_mesh(said.mesh)
    if said.tenants is not None:
        options["tenants"] = tenants_named(said.tenants, rank=said.rank, tuning=said.tuning)
    elif said.rank is not None:
        raise ConfigError("--rank is of tenants; give --tenants N, or --tuning lora=R for one LoRA")
    elif said.tuning is not None:
        options["tuning"] = tuning_named(said.tuning)
    if said.tokens_per_pass is not None:
        options["tokens_per_pass"] = said.tokens_per_pass
    if said.resize_vocab is not None:
        options["resize_vocab"] = said.resize_vocab
    if said.budget_bytes is not None:
        options["budget_bytes"] = said.budget_bytes
    return options


def _about_training(machines: PlanAsked) -> dict[str, Any]:
    """What has been said of the machines that a training is to run on."""
    from shardwise.tensors.byte_sizes import in_bytes_of

    said: dict[str, Any] = {}
    for option, name, text in (
        ("--memory", "memory_bytes", machines.memory),
        ("--read-rate", "read_bytes_per_s", machines.read_rate),
    ):
        if text == "measured" and name == "read_bytes_per_s":
            from shardwise.training.foretelling.step_memory import Measured

            said[name] = Measured()
        elif text is not None:
            try:
                said[name] = in_bytes_of(text)
            except ConfigError as error:
                raise ConfigError(f"{option}: {error}") from error
    if machines.tflops is not None:
        said["flops_per_s"] = machines.tflops * 1e12
    return said


def _require_unsaid(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} is not for this plan: the configuration or the other options say it")


def _of_config(said: PlanAsked, about: Mapping[str, Any]) -> Forecast | TrainingPlan:
    """The plan of a training, or of the tenants, that a file describes."""
    try:
        from shardwise.tenants.config import is_of_many, tenants_of
        from shardwise.training.configuration.config import config_of, read_values
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"configurations are read by {error.name}, which is not installed; pip install 'shardwise[train]'"
        ) from error
    from shardwise.tenants.foreseeing import plan_tenants
    from shardwise.training.foretelling.foreseeing import plan_training

    values, told = read_values(said.model, said.overrides)
    if not is_of_many(values):
        return plan_training(config_of(values, told), **said.place, **about)
    if about:
        raise ConfigError(f"{told}: --memory, --tflops and --read-rate are of one training, not of tenants")
    return plan_tenants(tenants_of(values, told), **said.place)


def _of_step(said: PlanAsked, options: PlanOptions, about: Mapping[str, Any]) -> TrainingPlan:
    """The plan of a training that options describe."""
    from shardwise.training.foretelling.foreseeing import StepAsked, foresee_step
    from shardwise.training.foretelling.step_memory import Machines

    if said.seq is None:
        raise ConfigError("--batch is of a training; give --seq, the tokens of a row, too")
    asked = StepAsked(said.batch or 1, said.seq)
    return foresee_step(said.model, asked, options, Machines(**said.place, **about))


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
