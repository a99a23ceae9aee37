"""Times that ranks wait for each other."""

import math
from dataclasses import dataclass

from shardwise.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times that ranks wait for each other, in seconds.

    Attributes:
        heartbeat_interval_s: time between two heartbeats.
        heartbeat_timeout_s: time without a heartbeat after which a rank counts as lost, in a call or since its last
            one.
        join_timeout_s: time until a rank reaches a call. It may still be busy.
        meeting_timeout_s: time until a rank that is alive reaches the next meeting of a call.
    """

    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 18.0
    join_timeout_s: float = 1800.0
    meeting_timeout_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.heartbeat_timeout_s <= self.join_timeout_s or not math.isfinite(
            self.heartbeat_timeout_s
        ):
            raise ConfigError(
                f"{self}: not ascending. Pass heartbeat_interval_s < heartbeat_timeout_s <= join_timeout_s"
            )
        if not self.meeting_timeout_s > 0:  # as NaN is not
            raise ConfigError(f"{self}: meeting_timeout_s is not positive. Pass seconds, or math.inf for no limit")
