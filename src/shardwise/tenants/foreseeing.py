"""What many trainings on one bank will take."""

from __future__ import annotations

from shardwise.engines.forecasting import forecast_of
from shardwise.engines.plan_options import PlanOptions
from shardwise.errors import ConfigError
from shardwise.report.forecast import Forecast
from shardwise.storage.names import HubOptions
from shardwise.tenants.sections import TenantsConfig
from shardwise.training.configuration.config_values import decided, sharding_on, tuning_of
from shardwise.training.configured_model import tokenizer_of
from shardwise.tuning.modes import Lora


def plan_tenants(config: TenantsConfig, *, ranks: int, nodes: int = 1, device: str = "cuda") -> Forecast:
    """What the bank of these tenants takes on each rank, all of them at once. Collective: no.

    Raises:
        ConfigError: a tenant begins with an adapter that is there already, whose shape its own files tell.
        ShardwiseError: as of :func:`~shardwise.verbs.plan.plan`.
    """
    is_accelerator = device != "cpu"
    first = decided(
        next(iter(config.tenants.values())),
        "bfloat16" if is_accelerator else "float32",
        is_accelerator=is_accelerator,
    )
    loras: list[Lora] = []
    for name, tenant in config.tenants.items():
        tuning = tuning_of(tenant.tuning)
        if not isinstance(tuning, Lora):
            raise ConfigError(
                f"tenants: {name} goes on with an adapter that is there; its size is that of its files, give the "
                "tuning that made it"
            )
        loras.append(tuning)
    options: PlanOptions = {
        "tenants": loras,
        "tokens_per_pass": config.bank.tokens_per_pass,
        "sharding": sharding_on(first.sharding, first.options(), None),
        "hub": HubOptions(revision=first.model.revision),
        "trust_remote_code": first.model.trust_remote_code,
        "nodes": nodes,
        "device": device,
    }
    if ranks == 1:  # no policy casts it on the way
        options["dtype"] = first.options().dtype
    if first.model.resize_vocab is not None:
        size = first.model.resize_vocab
        options["resize_vocab"] = len(tokenizer_of(first.model)) if isinstance(size, str) else size
    return forecast_of(first.model.name, ranks, options)
