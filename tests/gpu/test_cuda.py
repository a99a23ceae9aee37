"""The same bits on an accelerator. One device is enough: a mesh of one rank."""

import json
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests import truth, zoo
from tests.integrations.requirements import require_patched_names
from tests.loading import on_ranks
from tests.quantized import quantizing
from tests.quantized.requirements import needs_packed_shards
from tests.state import sharding
from tests.training import tiny
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForSequenceClassification, MixtralForCausalLM, Trainer, TrainingArguments
from transformers.models.llama import modeling_llama

import shardwise
from shardwise.core.computed import ComputeTask
from shardwise.fsdp.named_tensors import raw_bytes
from shardwise.fsdp.torch_private import both_backends, is_compiled_in_place
from shardwise.transfer.checksums import checksums
from shardwise.transfer.device_computing import matches_cpu_bitwise

Fp4, Nf4 = shardwise.options.Fp4, shardwise.options.Nf4

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module", params=["cuda", "npu"])
def kind(request):
    """A process has one kind of accelerator: npu where ``tests.accelerator.simulated`` has begun."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != request.param:
        pytest.skip(f"no {request.param} device")
    return request.param


@pytest.fixture
def module(kind):
    return torch.get_device_module(kind)


@pytest.fixture
def one_rank(kind, module):
    module.set_device(0)
    dist.init_process_group(both_backends(torch.device(kind)), store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mixtral")
    (specimen,) = (item for item in zoo.causal_lm_specimens() if item.name == "mixtral")
    zoo.save_original(zoo.build(specimen), directory)
    return str(directory)


def on_cpu(values):
    return {name: value.cpu() for name, value in values.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_load_has_the_bits_of_the_cpu(mixtral, one_rank, dtype, kind):
    model = shardwise.from_pretrained(mixtral, dtype=dtype)
    assert all(parameter.device.type == kind for parameter in model.parameters())
    assert all(buffer.device.type == kind for buffer in model.buffers())
    found = on_cpu(truth.snapshot(model)["values"])
    expected = MixtralForCausalLM.from_pretrained(mixtral, dtype=truth.DTYPES[dtype])
    assert truth.differences({"values": found, "ties": []}, truth.snapshot(expected) | {"ties": []}) == []


def test_an_unsharded_load_goes_to_the_device_requested(mixtral, kind):
    options = shardwise.options.LoadOptions(device=torch.device(kind, 0))
    on_gpu = shardwise.from_pretrained(mixtral, options=options)
    assert all(parameter.device.type == kind for parameter in on_gpu.parameters())
    on_host = shardwise.from_pretrained(mixtral)
    values = on_cpu(truth.snapshot(on_gpu)["values"])
    assert truth.differences({"values": values, "ties": []}, truth.snapshot(on_host) | {"ties": []}) == []


@pytest.mark.parametrize("form", ["dequantize", Nf4(block_size=32), Fp4(block_size=32)], ids=str)
def test_fp8_is_decoded_and_packed_on_the_device_with_the_bits_of_the_cpu(tmp_path, kind, form):
    (specimen,) = (item for item in zoo.causal_lm_specimens() if item.name == "llama")
    zoo.save_original(zoo.build(specimen), tmp_path)
    quantizing.quantize(tmp_path, "fp8 blocks")
    device = torch.device(kind, 0)
    assert matches_cpu_bitwise(device)
    keywords = {"dtype": "bfloat16", "quantization": form}
    with mock.patch.object(ComputeTask, "evaluate", side_effect=AssertionError("computed on the host")):
        options = shardwise.options.LoadOptions(device=device)
        on_gpu = shardwise.from_pretrained(tmp_path, options=options, **keywords)
    on_host = shardwise.from_pretrained(tmp_path, **keywords)
    for (name, one), other in zip(on_gpu.named_parameters(), on_host.parameters(), strict=True):
        assert torch.equal(raw_bytes(one.cpu()), raw_bytes(other)), name


def test_it_trains(mixtral, one_rank, kind):
    model = shardwise.from_pretrained(mixtral, dtype="float32")
    tokens = on_ranks.batch(model.config.vocab_size, rows=2, seed=0).to(kind)
    found = on_ranks.loss_and_gradients(model, tokens)
    assert all(value.isfinite().all() for value in found.values())
    assert len(found) > 5


def test_the_trainer_moves_a_model_of_one_process_to_its_device(mixtral, kind, tmp_path):
    require_patched_names()
    from shardwise.integrations import ShardwiseTrainer, for_trainer

    model = for_trainer(shardwise.from_pretrained(mixtral, dtype="float32"))
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no")
    ids = list(range(8))
    trainer = type("Mine", (ShardwiseTrainer, Trainer), {})(
        model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}]
    )
    trainer.train()
    assert {parameter.device.type for parameter in model.parameters()} == {kind}


def test_liger_has_the_losses_of_the_model_itself(one_rank, kind, tmp_path):
    pytest.importorskip("liger_kernel")
    if kind != "cuda":
        pytest.skip("Liger's kernels are in Triton")
    (specimen,) = (item for item in zoo.causal_lm_specimens() if item.name == "llama")
    folder = zoo.save_original(zoo.build(specimen), tmp_path)
    losses = []
    for keywords in ({}, {"liger_kernel_config": {"fused_linear_cross_entropy": False}}):
        with mock.patch.dict(vars(modeling_llama)):  # Liger replaces its classes and functions, too
            model = shardwise.from_pretrained(folder, dtype="float32", **keywords).train()
            losses.append(steps_of(model, kind))
        patched = [name for name, module in model.named_modules() if "forward" in vars(module)]
        assert bool(keywords) == any(name.endswith("mlp") for name in patched)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("way", ["inductor", "flash_attention_2"])
def test_a_way_of_computing_has_the_losses_of_the_model_itself(one_rank, kind, tmp_path, way):
    """Compiled blocks, and attention by a library. Unmeasured: it was written on a machine without a GPU."""
    if kind != "cuda":
        pytest.skip("for CUDA")
    if way == "inductor":
        dtype, bound = "float32", 1e-3
        keywords = {"sharding": shardwise.Sharding(compile={"backend": "inductor"})}
    else:
        pytest.importorskip("flash_attn")
        dtype, bound = "bfloat16", 0.05  # its kernels take no float32
        keywords = {"attn_implementation": way}
    tiny.write_model(tmp_path)
    losses = []
    for changed in ({"attn_implementation": "eager"}, keywords):
        model = shardwise.from_pretrained(tmp_path, dtype=dtype, **changed).train()
        losses.append(steps_of(model, kind))
    assert any(map(is_compiled_in_place, model.modules())) == (way == "inductor")
    assert losses[1] == pytest.approx(losses[0], rel=bound)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("tuning", [{}, {"use_peft": True, "lora_target_modules": "all-linear"}])
def test_vllm_in_this_process_samples_from_the_trained_weights(kind, tmp_path, tuning):
    """GRPO with ``vllm_mode: colocate``, one rank. Unmeasured: it was written on a machine without a GPU.

    TRL logs by how much the engine's log-probabilities of its samples are others than those of the trained model.
    """
    pytest.importorskip("vllm")
    if kind != "cuda":
        pytest.skip("vLLM has no engine for it")
    from tests.training import on_ranks as trainings

    folder = trainings.prepare(tmp_path)
    values = trainings.COMMON | {
        "model_name_or_path": str(trainings.write_wide(folder)),  # heads of 32, which all attention of vLLM takes
        "dataset_name": str(folder / "prompts.jsonl"),
        "output_dir": str(folder / "out"),
        "reward_funcs": ["tests.training.on_ranks.letters"],
        "num_generations": 2,
        "max_completion_length": 8,
        "max_length": None,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 128,
        **tuning,
    }
    (folder / "grpo.json").write_text(json.dumps(values))  # which is YAML
    subprocess.run([sys.executable, "-m", "shardwise", "train", "grpo", str(folder / "grpo.json")], check=True)
    state = json.loads((folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    differences = [entry["sampling/sampling_logp_difference/mean"] for entry in state["log_history"][:3]]
    assert all(difference < 0.05 for difference in differences)


def steps_of(model, kind):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = on_ranks.batch(model.config.vocab_size, rows=2, seed=0).to(kind)
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_missing_tensors_are_those_of_the_cpu(mixtral, one_rank):
    keywords = {
        "on_missing": shardwise.options.Initialize(("score.*",)),
        "on_unexpected": shardwise.options.Ignore(),
        "model_class": AutoModelForSequenceClassification,
    }
    on_gpu = shardwise.from_pretrained(mixtral, **keywords).score.weight
    dist.destroy_process_group()
    on_host = shardwise.from_pretrained(mixtral, **keywords).score.weight
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert torch.equal(truth.whole(on_gpu).cpu(), on_host)


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_of_the_host_is_sharded_onto_the_gpu_with_its_optimizer(one_rank, fused, kind):
    net, expected = sharding.net_of(0), sharding.net_of(0)
    optimizers = [torch.optim.AdamW(item.parameters(), lr=0.01, fused=fused) for item in (net, expected)]
    for item, optimizer in zip((net, expected), optimizers, strict=True):
        sharding.train(item, [optimizer], [], range(2))
    shardwise.shard(net, optimizers=optimizers[:1])
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(truth.whole(one).cpu(), other.detach())
    assert all(parameter.device.type == kind for parameter in net.parameters())
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(9))
    for item, optimizer in zip((net, expected), optimizers, strict=True):
        item(rows.to(next(item.parameters()).device)).square().mean().backward()
        optimizer.step()
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(truth.whole(one).cpu(), other.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_states_go_to_the_host_and_back(one_rank, fused, kind):
    nets = [sharding.net_of(seed) for seed in (0, 1)]
    optimizers = []
    for net in nets:
        shardwise.shard(net)
        optimizers.append(torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused))
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(9)).to(kind)
    for _ in range(2):
        nets[0](rows).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    state, moments = (
        shardwise.get_model_state_dict(nets[0]),
        shardwise.get_optimizer_state_dict(nets[0], optimizers[0]),
    )
    tensors = [value for values in moments["state"].values() for value in values.values()]
    assert {tensor.device.type for tensor in [*state.values(), *tensors]} == {"cpu"}
    shardwise.set_model_state_dict(nets[1], state)
    shardwise.set_optimizer_state_dict(nets[1], optimizers[1], moments)
    for net, optimizer in zip(nets, optimizers, strict=True):
        net(rows).square().mean().backward()
        optimizer.step()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert one.device.type == kind
        assert torch.equal(truth.whole(one), truth.whole(other))


LONG = {"cuda": 200_000_000, "npu": 100_000}
"""A tenth of a second: in cycles, and in microseconds."""


@pytest.fixture
def side(module):
    """A stream that is not the one that threads begin with."""
    stream = module.Stream()
    with module.stream(stream):
        yield stream
    stream.synchronize()


def test_a_load_comes_after_what_was_requested_from_the_device_before(mixtral, side, kind, module):
    """Weights that are still being written over, in the stream of the caller."""
    device = torch.device(kind, 0)
    options = shardwise.options.LoadOptions(device=device)
    model = shardwise.from_pretrained(mixtral, options=options)
    expected = on_cpu(truth.snapshot(model)["values"])
    module._sleep(LONG[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    shardwise.load(model, mixtral, options=options)
    found = on_cpu(truth.snapshot(model)["values"])
    assert truth.differences({"values": found, "ties": []}, {"values": expected, "ties": []}) == []


def test_a_save_has_what_was_requested_from_the_device_before(mixtral, side, tmp_path, kind, module):
    model = shardwise.from_pretrained(mixtral, options=shardwise.options.LoadOptions(device=torch.device(kind, 0)))
    module._sleep(LONG[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    shardwise.save(model, tmp_path / "saved")
    saved = shardwise.from_pretrained(tmp_path / "saved")
    assert all(bool((parameter == 7).all()) for parameter in saved.parameters())


def test_a_stream_of_tensors_has_what_was_requested_before_its_call(mixtral, one_rank, kind, module):
    """Also where a reader goes through it on a stream of its own, which waits for nothing."""
    model = shardwise.from_pretrained(mixtral)
    module.synchronize()
    module._sleep(LONG[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    tensors = shardwise.iter_hf_tensors(model)
    reader = module.Stream()
    with module.stream(reader):
        found = [tensor.clone() for _, tensor in tensors]
    reader.synchronize()
    assert found
    assert all(bool((tensor == 7).all()) for tensor in found)


def test_memory_that_torch_keeps_counts_as_free(mixtral, kind, module):
    """A load that fits only into what was freed and is kept."""
    from shardwise.transfer.memory import available_memory

    device = torch.device(kind, 0)
    free = module.mem_get_info(device)[0]
    filler = torch.empty(free - (256 << 20), dtype=torch.uint8, device=device)
    before = available_memory(device).device_bytes
    del filler
    after = available_memory(device).device_bytes
    assert before is not None
    assert after is not None
    assert after - before >= free - (512 << 20)
    shardwise.from_pretrained(mixtral, options=shardwise.options.LoadOptions(device=device))
    module.empty_cache()


@pytest.mark.parametrize("numel", [0, 1, 1000, (3 << 20) + 5])
def test_a_checksum_is_that_of_the_host(monkeypatch, numel, kind):
    monkeypatch.setattr("shardwise.transfer.checksums._CHUNK_BYTES", 1 << 20)
    tensors = [torch.randn(numel).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn)]
    tensors += [tensor[3:] for tensor in tensors] + [torch.randn(numel // 7, 7).t()]
    assert checksums([tensor.to(kind) for tensor in tensors]) == checksums(tensors)


@needs_packed_shards
@pytest.mark.parametrize("double_quant", [False, True])
def test_a_base_in_four_bits(tmp_path, one_rank, double_quant, kind):
    """Its bytes are those of the CPU; products are within the rounding of bfloat16."""
    (specimen,) = (item for item in zoo.causal_lm_specimens() if item.name == "llama")
    model = zoo.build(specimen)
    zoo.save_original(model, tmp_path)
    quantization = shardwise.options.Nf4(block_size=32, double_quant=double_quant)
    there = shardwise.from_pretrained(str(tmp_path), dtype="bfloat16", quantization=quantization)
    here = shardwise.from_pretrained(
        str(tmp_path),
        dtype="bfloat16",
        quantization=quantization,
        sharding=shardwise.Sharding(mesh=init_device_mesh("cpu", (1,))),
    )
    first, second = on_cpu(there.state_dict()), here.state_dict()
    for model in (there, here):
        model.set_attn_implementation("eager")
    assert all(torch.equal(truth.whole(first[name]), truth.whole(second[name])) for name in first)
    tokens = torch.arange(12).view(1, 12)
    answers = there(tokens.to(kind)).logits.cpu().float(), here(tokens).logits.float()
    assert torch.allclose(*answers, rtol=2e-2, atol=2e-2)
