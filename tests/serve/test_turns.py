"""Turns: order of each queue, the budget, and how long a key waits."""

import math
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from shardwise.serve.turns import Cost, Stage, TurnPlan, find_early_steps, next_turn

_COSTS = st.one_of(
    st.builds(Cost, st.just(Stage.PASS), st.integers(1, 150)),
    st.just(Cost(Stage.STEP)),
    st.builds(Cost, st.just(Stage.OTHER), st.integers(0, 150)),
    st.just(Cost(Stage.OTHER, is_slow=True)),
)
_QUEUES = st.dictionaries(
    st.sampled_from("abcd"), st.dictionaries(st.sampled_from("xyz"), st.lists(_COSTS, max_size=8), max_size=3)
).map(lambda queues: {key: {key + name: of for name, of in named.items()} for key, named in queues.items()})

Queues = Mapping[str, Mapping[str, Sequence[Cost]]]


def taken_costs(queues: Queues, plan: TurnPlan) -> dict[str, Sequence[Cost]]:
    return {name: of[: plan.num_requests.get(name, 0)] for named in queues.values() for name, of in named.items()}


@given(_QUEUES, st.integers(1, 200), st.integers(1, 100))
def test_a_turn_keeps_to_order_and_budget(queues: Queues, budget: int, quantum: int) -> None:
    plan = next_turn(queues, {}, (), budget=budget, quantum=quantum)
    taken = taken_costs(queues, plan)
    for costs in taken.values():
        stages = [cost.stage for cost in costs]
        assert stages == sorted(stages)
        assert stages.count(Stage.STEP) <= 1
    tokens = [cost.tokens for costs in taken.values() for cost in costs if cost.tokens]
    assert sum(tokens) <= budget or len(tokens) == 1
    assert any(taken.values()) or not any(of for named in queues.values() for of in named.values())
    for named in queues.values():
        assert sum(cost.is_slow for name in named for cost in taken[name]) <= 1


@given(_QUEUES, st.integers(1, 200), st.integers(1, 100))
def test_what_costs_nothing_runs_at_once(queues: Queues, budget: int, quantum: int) -> None:
    plan = next_turn(queues, {}, (), budget=budget, quantum=quantum)
    for name, costs in taken_costs(queues, plan).items():
        named = next(named for named in queues.values() if name in named)
        rest = named[name][len(costs) :]
        has_slow = any(cost.is_slow for other in named for cost in named[other][: plan.num_requests.get(other, 0)])
        if rest and not rest[0].tokens and not (rest[0].is_slow and has_slow):
            assert costs[-1].stage > rest[0].stage or (costs[-1].stage is rest[0].stage is Stage.STEP)


@given(_QUEUES, st.integers(10, 200), st.integers(5, 100))
def test_no_key_waits_long(queues: Queues, budget: int, quantum: int) -> None:
    """Each turn takes of the requests, until none is left; new ones of other keys come in each turn."""
    left = {key: {name: list(of) for name, of in named.items()} for key, named in queues.items()}
    active = [key for key, named in left.items() if any(named.values())]
    heads = {key: max((of[0].tokens for of in left[key].values() if of), default=0) for key in active}
    waited = dict.fromkeys(active, 0)
    credit: Mapping[str, int] = {}
    order: Sequence[str] = ()
    while any(any(named.values()) for named in left.values()):
        num_active = sum(any(named.values()) for named in left.values())
        plan = next_turn(left, credit, order, budget=budget, quantum=quantum)
        credit, order = plan.credits, plan.order
        for key in active:
            if not any(left[key].values()):
                continue
            if any(plan.num_requests.get(name, 0) for name in left[key]):
                waited[key] = 0
            else:
                waited[key] += 1
            bound = math.ceil(max(heads[key], 1) / quantum) * max(num_active, len(active))
            assert waited[key] < max(bound, 1), (key, waited, bound)
            for name, queue in left[key].items():
                del queue[: plan.num_requests.get(name, 0)]
            heads[key] = max((of[0].tokens for of in left[key].values() if of), default=0)


def test_models_of_all_keys_share_a_turn() -> None:
    queues = {"a": {"a1": [Cost(Stage.PASS, 60), Cost(Stage.PASS, 60)]}, "b": {"b1": [Cost(Stage.PASS, 40)]}}
    plan = next_turn(queues, {}, (), budget=100, quantum=100)
    assert plan.num_requests == {"a1": 1, "b1": 1}
    assert plan.order == ("b", "a")


def test_a_request_above_the_budget_runs_alone() -> None:
    queues = {"a": {"a1": [Cost(Stage.PASS, 500)]}, "b": {"b1": [Cost(Stage.PASS, 40)]}}
    first = next_turn(queues, {}, ("b", "a"), budget=100, quantum=50)
    assert first.num_requests == {"b1": 1}
    queues["b"]["b1"] = [Cost(Stage.PASS, 40)]
    for _ in range(20):
        plan = next_turn(queues, first.credits, first.order, budget=100, quantum=50)
        if "a1" in plan.num_requests:
            break
        first = plan
    assert plan.num_requests == {"a1": 1}


@given(_QUEUES)
def test_steps_come_early_only_where_passes_would_not_wait_for_them(queues: Queues) -> None:
    steps = find_early_steps(queues)
    heads = {name: of[0].stage for named in queues.values() for name, of in named.items() if of}
    first_steps = {name for name in heads if heads[name] is Stage.STEP}
    assert steps.keys() == (first_steps if Stage.PASS in heads.values() else set())
    assert set(steps.values()) <= {1}


def test_models_that_train_alike_come_into_one_turn() -> None:
    """Of two models each sends a pass and a step, and the next ones after the step. That of "b" is late once."""
    a_pass, a_step = Cost(Stage.PASS, 10), Cost(Stage.STEP)
    queues: dict[str, dict[str, list[Cost]]] = {"key": {"a": [a_pass, a_step], "b": [a_pass]}}
    turns = []
    for number in range(8):
        num_requests = find_early_steps(queues) or next_turn(queues, {}, (), budget=100, quantum=100).num_requests
        turns.append(
            "".join(
                sorted(
                    name for name, of in queues["key"].items() if of and of[0] is a_pass and num_requests.get(name)
                )
            )
        )
        for name, requests in queues["key"].items():
            taken = requests[: num_requests.get(name, 0)]
            del requests[: len(taken)]
            if a_step in taken:
                requests += [a_pass, a_step]
            elif not number and name == "b":
                requests.append(a_step)
    assert turns == ["ab", "", "ab", "ab", "ab", "ab", "ab", "ab"]
