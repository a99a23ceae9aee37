"""``use_vllm``: TRL's trainers with a stand-in for vLLM's engine get the weights of the merged model."""

import shutil
from pathlib import Path

import pytest
from tests.quantized.quantizing import quantize
from tests.quantized.requirements import SHARDS_PACKED
from tests.support.world import run_forked as run_world
from tests.training import engines
from tests.training.on_ranks import prepare, write_teacher, write_wide

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

KINDS = [kind for kind in engines.KINDS if SHARDS_PACKED or "qlora" not in kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("engines"))
    write_wide(folder)
    write_teacher(folder)
    engines.write_mixture(folder)
    shutil.copytree(folder / "model", folder / "quantized")
    (folder / "quantized" / "model.safetensors").rename(folder / "quantized" / "model-1.safetensors")
    quantize(folder / "quantized", "fp8 blocks")
    return folder


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, "colocate") for kind in KINDS),
        *((kind, "server") for kind in KINDS if kind in ("full", "lora", "qlora", "lora of experts")),
    ],
)
def test_the_engine_gets_the_merged_model_of_each_step(folder: Path, tmp_path: Path, kind: str, mode: str) -> None:
    """On one rank and on two, which train alike on what it answers."""
    steps = []
    for ranks in (1, 2):
        with engines.WeightServer() as server:
            url = server.url if mode == "server" else None
            found = run_world(ranks, engines.compare, str(folder), kind, url, str(tmp_path))
        assert [faults for faults, *_ in found] == [[]] * ranks
        _, described, logged = found[0]
        if mode == "server":
            update = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
            assert server.calls == ["init_weight_transfer_engine", *(engines.STEPS * update)]
            assert server.announced == [described] * engines.STEPS
        steps.append([number for step in logged for number in step])
    assert len(steps[0]) == 3 * engines.STEPS
    assert steps[1] == pytest.approx(steps[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("where", "mode", "message"),
    [
        ("stream", "server", "rank 1: OSError: the memory is gone"),
        ("engine", "colocate", "rank 1: KeyError: 'no such parameter'"),
        ("sender", "server", "rank 0: KeyError: 'no such parameter'"),
        ("start_weight_update", "server", "rank 0: Exception: Request failed: 400, {"),
        ("update_weights", "server", "rank 0: Exception: Request failed: 500, {"),
        ("no server", "server", "rank 0: ConnectionError: The vLLM server can't be reached"),
        ("quantized", "colocate", "quantized is stored in the form fp8, of which vLLM would make its layers"),
    ],
)
def test_a_rank_that_fails_is_one_error_on_all(
    folder: Path, tmp_path: Path, where: str, mode: str, message: str
) -> None:
    """A server is told of all tensors first, and waits for them: it gets the others, too."""
    with engines.WeightServer() as server:
        server.refused = where
        url = server.url if mode == "server" else None
        if where == "no server":
            url = "http://127.0.0.1:9"
        first, second = run_world(2, engines.fail, str(folder), where, url, str(tmp_path))
    assert first == second
    assert message in first
