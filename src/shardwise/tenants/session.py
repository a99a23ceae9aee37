"""Many trainings on one base, from their configuration: what is made ready, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.bank.adapter_bank import AdapterBank
from shardwise.bank.backends import BackendChoice, FewestProducts, GroupedAlways, LoopedAlways
from shardwise.bank.optimizers import ShardedMoments, WholeMoments
from shardwise.errors import (
    ConfigError,
    CoverageError,
    FormatError,
    RankLostError,
    StorageError,
)
from shardwise.execution.moving.group_gather import gather_in_windows
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.world import World
from shardwise.models.placement import computing_device
from shardwise.report.load_report import LoadReport
from shardwise.tenants.keeping import TenantKeeper
from shardwise.tenants.loop import TurnLoop
from shardwise.tenants.report import Ended, TenantReport
from shardwise.tenants.sections import BankSection, TenantsConfig
from shardwise.tenants.trainee import CommonGround, TenantListener, Trainee
from shardwise.tenants.turns import PassBudget
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.configuration.config_values import resolved, sharding_of
from shardwise.training.configured_model import request_of, tokenizer_of
from shardwise.training.data.read_once import TrainData
from shardwise.training.metrics import MetricsFile
from shardwise.training.optimizing.optimizers import optimizers_of
from shardwise.training.prepare import (
    require_embeddings,
    require_place,
    set_attention,
)
from shardwise.training.resuming import require_free
from shardwise.training.session import read_rows, write_config
from shardwise.training.stopping import StopRequest
from shardwise.verbs.pretrained import from_pretrained

_ALONE = (ConfigError, CoverageError, FormatError, StorageError)
"""What is wrong with one tenant, the same on every rank; the others are trained."""


@dataclass(frozen=True)
class _Rows:
    """What a tenant learns, and where it keeps itself."""

    data: TrainData
    held_out: TrainData | None
    keeper: TenantKeeper
    source: Path | None


@dataclass(frozen=True)
class TenantsSession:
    """All that the tenants need, read and in its place. In the output folder each has a folder of its name."""

    config: TenantsConfig
    rank: int
    size: int
    loaded: LoadReport | None
    """None where no tenant was left to load the base for."""
    bank: AdapterBank | None
    trainees: tuple[Trainee, ...]
    refused: Mapping[str, str]
    """Why a tenant is not trained, by name."""

    @classmethod
    def begin(cls, config: TenantsConfig, cache_root: Path | None = None) -> TenantsSession:
        """Read everything, cheap things that may be refused first. Collective: yes, over the default process group.

        What is wrong with one tenant, its data say, refuses it alone. ``cache_root`` is as of a training.

        Raises:
            ShardwiseError: the base, or something of all of them, cannot be had as configured.
        """
        world, shared = World.current(), config.shared
        world.require_equal(config.to_yaml(), "the configuration")
        tokenizer = tokenizer_of(shared.model)
        refused: dict[str, str] = {}
        rows: dict[str, _Rows] = {}
        for name, own in config.tenants.items():
            try:
                rows[name] = _made_ready(own, tokenizer, cache_root)
            except _ALONE as error:
                refused[name] = str(error)
        if not rows:
            return cls(config, world.rank, world.size, None, None, (), refused)
        model, loaded = _load_base(shared, tokenizer)
        bank = AdapterBank(model, backend=_backend_of(config.bank), pad_to=config.bank.pad_to)
        ground = CommonGround(
            world,
            computing_device(next(model.parameters())),
            PassBudget(config.bank.tokens_per_pass, config.bank.pad_to, bank.longest),
            ShardedMoments() if config.bank.optimizer_state == "sharded" else WholeMoments(),
            tokenizer,
        )
        trainees = []
        for name, each in rows.items():
            try:
                trainees.append(_joined(name, config.tenants[name], each, model, bank, ground))
            except _ALONE as error:
                refused[name] = str(error)
        return cls(config, world.rank, world.size, loaded, bank, tuple(trainees), refused)

    def train(
        self,
        listener_of: Callable[[Trainee], TenantListener],
        stop: StopRequest,
        when_stuck: Callable[[RankLostError], object] = lambda error: None,
    ) -> list[TenantReport]:
        """Train all that are not refused, with metrics kept on the first rank; what became of each.

        Collective: yes.

        Args:
            listener_of: makes who is told of a tenant's steps, evaluations and checkpoints, on every rank.
            stop: as of :class:`~shardwise.tenants.loop.TurnLoop`.
            when_stuck: the same.

        Raises:
            ShardwiseError: as of :meth:`~shardwise.tenants.loop.TurnLoop.go`.
        """
        ended: list[TenantReport] = []
        if self.bank is not None and self.trainees:
            World.current().from_first(self._write_configs)
            for trainee in self.trainees:
                metrics = [MetricsFile(trainee.output / "metrics.jsonl")] if self.rank == 0 else []
                trainee.begin_telling(listener_of(trainee), *metrics)
            loop = TurnLoop(
                World.current(call="the tenants' passes"),
                self.bank,
                self.trainees,
                tokens_per_pass=self.config.bank.tokens_per_pass,
                stop=stop,
                when_stuck=when_stuck,
            )
            try:
                ended = loop.go()
            finally:
                for trainee in self.trainees:
                    trainee.close()
        told = {report.name: report for report in ended}
        told |= {name: TenantReport(name, Ended.REFUSED, cause) for name, cause in self.refused.items()}
        return [told[name] for name in self.config.tenants]

    def _write_configs(self) -> None:
        """What was asked for: of all, and of each tenant as a training alone."""
        write_config(self.config, Path(self.config.output))
        for trainee in self.trainees:
            write_config(trainee.config, trainee.output)


def _made_ready(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, cache_root: Path | None) -> _Rows:
    """A tenant's data, and where it goes on from. Collective: yes.

    Raises:
        ConfigError, StorageError: the same on every rank.
    """
    world, section = World.current(), config.checkpoints
    output = Path(config.output.directory)
    world.together(lambda: optimizers_of(config.options()))
    require_place(str(output / "last"))
    is_own = section.resume in ("auto", "never")
    elsewhere = None if is_own else Path(section.resume) / output.name / "states"
    keeper = TenantKeeper(output / "states", elsewhere, keep=section.keep)
    source = world.from_first(keeper.newest)
    if source is not None and section.resume == "never":
        raise ConfigError(
            f"checkpoints.resume='never', but there is {source}; resume=auto goes on from it, and another "
            "output.directory begins anew"
        )
    if source is None:
        require_free(config, output)
    if source is None and not is_own:
        raise StorageError(f"checkpoints.resume={section.resume!r}: there is no complete checkpoint in {elsewhere}")
    data, held_out = read_rows(config, tokenizer, cache_root)
    return _Rows(data, held_out, keeper, source)


def _load_base(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedModel, LoadReport]:
    """The base, frozen, in the dtype that it is stored in, or computed in where no policy casts it on the way."""
    config = resolved(config, this_device())
    options = config.options()
    request = request_of(config, tokenizer, sharding_of(config.sharding, options))
    keywords = request.keywords()
    del keywords["tuning"]
    if World.current().size == 1:
        keywords["dtype"] = getattr(torch, options.dtype)
    model, loaded = from_pretrained(request.name_or_path, **keywords, output_loading_info=True)
    set_attention(model, config.model.attn_implementation)
    if this_device().type == "cpu":
        gather_in_windows(model, World.current())
    return model, loaded


def _joined(
    name: str,
    config: TrainConfig,
    rows: _Rows,
    model: PreTrainedModel,
    bank: AdapterBank,
    ground: CommonGround,
) -> Trainee:
    """A tenant in the bank. Collective: yes.

    Raises:
        ShardwiseError: it cannot be as configured; then there is none. The same on every rank.
    """
    for found in (rows.data, rows.held_out):
        if found is not None:
            require_embeddings(model, found)
    trainee = Trainee(name, config, rows.data, rows.held_out, rows.keeper, ground)
    trainee.join(bank, rows.source)
    return trainee


def _backend_of(section: BankSection) -> BackendChoice:
    match section.backend:
        case "fewest_products":
            return FewestProducts()
        case "looped":
            return LoopedAlways()
        case "grouped":
            return GroupedAlways()
        case _:
            assert_never(section.backend)
