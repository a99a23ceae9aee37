"""Meshes of several axes, placements and storages, a part of the sweep: bitwise as transformers loads it."""

import pytest
from tests import load_cases, truth, zoo
from tests.load_cases import WORLDS, Way
from tests.support.http_store import HttpStore
from transformers import CONFIG_MAPPING

# They differ in what a mesh makes hard: fused rows, stacked experts, transposed and tied matrices, odd sizes.
NAMES = {"llama", "gpt2", "hrm_text", "qwen3_5_moe_text", "bailing_hybrid", "zamba2"}

# Every mesh, every storage but the disk, and both ways to share reads.
WAYS = [
    Way("flat", "memory"),
    Way("ep", shared_reads="always"),
    *(
        pytest.param(way, marks=pytest.mark.slow)
        for way in (Way("hsdp", shared_reads="always"), Way("tp"), Way("shard1", "http"))
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def cases(folder):
    """Stored in float32 and loaded as bfloat16, and the other way round."""
    found = []
    for specimen in zoo.causal_lm_specimens():
        if specimen.name in NAMES:
            found += truth.prepare(specimen, folder, layouts=("original",), dtypes=("bfloat16",))
            found += truth.prepare(specimen, folder, layouts=("half",), dtypes=("float32",))
    assert len(found) == 2 * len(NAMES & set(CONFIG_MAPPING))  # transformers 5.17 lacks one
    return found


@pytest.fixture(scope="module")
def url(folder):
    with HttpStore(folder) as store:
        yield store.url


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_is_bitwise_equal(worlds, cases, url, way):
    way = Way(way.mesh, way.storage, url, way.shared_reads)
    cases = cases[way.storage == "memory" :: 2]  # of one dtype

    def compare(case):
        return worlds(WORLDS[way.mesh]).run(load_cases.load_and_compare, case, way)

    load_cases.require_no_faults(cases, compare, least=1 if way.mesh == "ep" else len(cases) - 2)


@pytest.mark.parametrize(
    ("mesh", "name", "kinds"),
    [
        ("hsdp", "llama", {"Replicate Shard"}),
        ("tp", "llama", {"Shard", "Shard Shard", "_StridedShard Shard"}),
        ("ep", "qwen3_5_moe_text", {"Shard", "_StridedShard Shard"}),
    ],
)
def test_placements_of_each_mesh(worlds, cases, mesh, name, kinds):
    (case, _) = (case for case in cases if case.specimen.name == name)
    assert worlds(4).run(load_cases.placements, case, Way(mesh)) == [kinds] * 4
