"""Which requests run next: a pure function of all queues.

[Note: Fair turns] Keys share the server by deficit round robin over tokens (Shreedhar and Varghese, 1996). A key
with requests gets a quantum of credit in each turn, and more while the turn has space left. A request runs once its
key has the credit. Each turn begins with the key that began one longest ago. A request whose key has the credit and
begins a turn runs, since it finds all of the budget. So with A active keys a request of t tokens at the head of its
queue waits for at most ceil(t / quantum) * A turns. Saves, loads and creations take long, and have no tokens: a key
has one of them in a turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Stage(IntEnum):
    """Part of a turn. Requests of a queue run in the order of their parts, and at most one of them is a step."""

    PASS = 0
    STEP = 1
    OTHER = 2


@dataclass(frozen=True, slots=True)
class Cost:
    """What is known of a request: the part of a turn in which it runs, and its tokens (0 if none is computed).

    ``is_slow`` is a save, a load or a creation.
    """

    stage: Stage
    tokens: int = 0
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A turn.

    Attributes:
        num_requests: number of requests from the head of each queue that has any.
        credits: of each key that has requests left, for the next turn.
        order: keys in the order in which the next turn considers them.
    """

    num_requests: dict[str, int]
    credits: dict[str, int] = field(default_factory=dict)
    order: tuple[str, ...] = ()


def find_early_steps(queues: Mapping[str, Mapping[str, Sequence[Cost]]]) -> dict[str, int]:
    """Return 1 for each queue that begins with a step, if other queues begin with a pass.

    A turn of these alone is short, and their models' next passes are then in one turn with those of the others.
    Otherwise a model whose step came when a turn had just begun would have its passes in every second turn, and the
    others theirs in the turns between.
    """
    heads = {name: of[0].stage for of_key in queues.values() for name, of in of_key.items() if of}
    if Stage.PASS not in heads.values():
        return {}
    return {name: 1 for name, stage in heads.items() if stage is Stage.STEP}


def next_turn(
    queues: Mapping[str, Mapping[str, Sequence[Cost]]],
    credits: Mapping[str, int],  # noqa: A002 - the word of the algorithm
    order: Sequence[str],
    *,
    budget: int,
    quantum: int,
) -> TurnPlan:
    """Choose the next turn. See [Note: Fair turns].

    Example: with a budget and quantum of 100 tokens, keys "a" (passes of 60 and 60 tokens) and "b" (40) get a turn
    with the first pass of "a" and that of "b". The next turn begins with "b".

    Args:
        queues: by key, the requests of each queue, in order.
        credits: of the last plan.
        order: of the last plan.
        budget: maximum number of tokens of a turn. A request with more runs in a turn without other tokens.
        quantum: tokens, at least 1.
    """
    # The key that began a turn longest ago comes first, a new one last.
    active = [key for key in queues if any(queues[key].values())]
    keys = [key for key in order if key in active] + [key for key in active if key not in order]
    left = {key: credits.get(key, 0) + quantum for key in keys}
    taken: dict[str, int] = {}
    stages: dict[str, Stage] = {}
    keys_with_slow: set[str] = set()
    used = 0
    # Each round deals requests to keys with credit. Another follows, with a quantum more for each key, as long as a
    # request fits into the budget and only lacks credit.
    while True:
        lacks_credit = False
        for key in keys:
            has_taken = True
            while has_taken:  # one request of each queue, again and again
                has_taken = False
                for name, requests in queues[key].items():
                    place = taken.get(name, 0)
                    # A pass behind a step waits for the next turn: it needs the values of after the step.
                    if place == len(requests) or requests[place].stage < stages.get(name, Stage.PASS):
                        continue
                    cost = requests[place]
                    if cost.is_slow and key in keys_with_slow:
                        continue
                    # With used == 0, one request above the budget runs, and no other with tokens.
                    if cost.tokens and used and used + cost.tokens > budget:
                        continue
                    if cost.tokens > left[key]:
                        lacks_credit = True
                        continue
                    left[key] -= cost.tokens
                    used += cost.tokens
                    if cost.is_slow:
                        keys_with_slow.add(key)
                    taken[name] = place + 1
                    # The steps of a turn are one call, with one step of each model.
                    stages[name] = Stage.OTHER if cost.stage is Stage.STEP else cost.stage
                    has_taken = True
        if not lacks_credit:
            break
        for key in keys:
            left[key] += quantum
    waiting = {key for key in keys if any(taken.get(name, 0) < len(of) for name, of in queues[key].items())}
    # Credit is for what waits. It is no more than the next request needs, so a key cannot hoard it.
    next_credits = {}
    for key in keys:
        if key in waiting:
            heads = [
                of[taken.get(name, 0)].tokens for name, of in queues[key].items() if taken.get(name, 0) < len(of)
            ]
            next_credits[key] = min(left[key], max(heads))
    return TurnPlan(taken, next_credits, (*keys[1:], *keys[:1]))
