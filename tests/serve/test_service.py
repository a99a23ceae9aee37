"""Turns and stops of a service without ranks: its operations have the outcomes of a test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.local_ranks import LIMIT_S

from shardwise.bank.compose import Unit, compose_passes
from shardwise.bank.sampling import SampleOutput
from shardwise.serve.checkpoints import CheckpointStore
from shardwise.serve.engine import deal_rows
from shardwise.serve.keys import LOCAL
from shardwise.serve.operations import CreateModel, Generate, SampleAnswer, SaveModel, Turn
from shardwise.serve.service import Service, Settings, name_model


async def run_turn(service: Service) -> Turn:
    turn, requests = await service.take_turn(LIMIT_S)
    await service.finish_turn(requests, {each.request_id: None for each in turn.operations}, 0.0)
    return turn


def test_a_session_that_is_closed_during_a_stop(tmp_path: Path) -> None:
    """Its models are saved once, and none of them is lost."""

    async def close() -> tuple[Service, list[Turn]]:
        service = Service(Settings("base", "base"), CheckpointStore(tmp_path))
        session = service.open_session(LOCAL, None)
        with service.open_model(session, 1, 4, frozenset(("attn",)), None) as request:
            model_id = name_model(session, 1)
            request.operation = CreateModel(request.request_id, model_id, 4, 0, frozenset(("attn",)))
        await run_turn(service)
        await service.begin_stop()
        service.close_session(session, "finished")
        return service, [await run_turn(service) for _ in range(2)]

    service, (first, second) = asyncio.run(close())
    folders = [Path(each.folder).name for each in first.operations if isinstance(each, SaveModel)]
    assert (folders, first.is_last, second.is_last) == (["finished"], False, True)
    assert service.lost_models == []


def test_samples_of_vllm_are_waited_for_at_a_stop() -> None:
    class Vllm:
        def __init__(self) -> None:
            self.may_go = asyncio.Event()

        async def sample(self, _operation: Generate) -> SampleOutput:
            await self.may_go.wait()
            return SampleOutput([])

    async def stop() -> tuple[list[bool], Any]:
        service, vllm = Service(Settings("base", "base"), None), Vllm()
        service.vllm = vllm  # type: ignore[assignment]
        with service.admit(LOCAL, "samples") as request:
            settings = {"n": 1, "max_tokens": 1}
            request.operation = Generate(request.request_id, None, None, (1,), settings)
            request.answer = SampleAnswer(1, prompt_logprobs=False)
        await service.begin_stop()
        turns = [await run_turn(service) for _ in range(3)]
        vllm.may_go.set()
        result = (await service.retrieve(LOCAL, request.request_id)).result
        return [*(turn.is_last for turn in turns), (await run_turn(service)).is_last], result

    are_last, result = asyncio.run(stop())
    assert are_last == [False, False, False, True]
    assert isinstance(result, bytes)


def test_rows_are_dealt_so_that_passes_are_short() -> None:
    lengths = [[100], [10] * 10]
    shares = deal_rows(lengths, 2)
    assert sorted(row for of_rank in shares[1] for row in of_rank) == list(range(10))
    units = [
        [Unit(of[row]) for of, share in zip(lengths, shares, strict=True) for row in share[rank]]
        for rank in range(2)
    ]
    plans = compose_passes(units, longest=128, max_tokens=8192, overhead=0)
    assert sum(plan.tokens * max(map(len, plan.units)) for plan in plans) == 112 + 5 * 16
