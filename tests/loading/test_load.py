"""``load`` of plain modules, of models of transformers, and of damaged checkpoints."""

import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save, save_file
from tests import truth, zoo
from tests.loading import on_ranks
from tests.loading.on_ranks import Plain, angles
from tests.small_checkpoints import MIXTRAL, small_qwen3
from tests.support.memory_storage import MemoryReader
from tests.support.world import require_same_error
from torch import nn
from transformers import Qwen3ForCausalLM

import shardwise
from shardwise import CheckpointError, FormatError, KeyMismatchError, ShardingError, StorageError
from shardwise.options import Initialize


@pytest.fixture
def plain(tmp_path):
    """A checkpoint of a plain module, with its truth."""
    torch.manual_seed(1)
    model = Plain()
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randint(1, 99, tensor.shape))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    return str(tmp_path), truth.snapshot(model)


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("kind", ["meta", "meta by default", "real"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_plain_sharded_module_is_filled(worlds, plain, kind, size):
    directory, expected = plain
    for found in worlds(size).run(on_ranks.load_plain, directory, kind, {}):
        assert truth.differences(found, expected) == []


def test_a_plain_module_alone(plain):
    directory, expected = plain
    model = on_meta(Plain)
    report = shardwise.load(model, directory, buffers={"*.angles": angles})
    assert truth.differences(truth.snapshot(model), expected) == []
    assert report.recomputed == ("blocks.0.angles", "blocks.1.angles")


def test_parameters_on_meta_become_real_in_place(plain):
    """An optimizer that was made before steps them, and hooks run until their handles remove them."""
    directory, _ = plain
    model = on_meta(Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = []
    *others, weight = model.parameters()
    handles = [weight.register_hook(lambda gradient: called.append("gradient"))]
    handles += [weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter is weight))]
    shardwise.load(model, directory, buffers={"*.angles": angles})
    assert all(one is other for one, other in zip(model.parameters(), [*others, weight], strict=True))
    before = weight.detach().clone()
    for expected in (["gradient", True], []):
        weight.sum().backward()
        assert called == expected
        called.clear()
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert torch.equal(weight, before - 0.2)


def test_real_buffers_of_a_plain_module_are_kept(plain):
    directory, expected = plain
    model = Plain()
    assert shardwise.load(model, directory).kept == ("blocks.0.angles", "blocks.1.angles")
    assert truth.differences(truth.snapshot(model), expected) == []


def test_buffers_on_meta_that_nothing_computes_are_refused_by_name(plain):
    with pytest.raises(KeyMismatchError, match=r"blocks\.\{0\.\.1\}\.angles.*\n.*buffers="):
        shardwise.load(on_meta(Plain), plain[0])


def test_buffers_that_reset_parameters_computes(tmp_path):
    class Angles(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.empty(4), persistent=False)

        def reset_parameters(self):
            self.table.copy_(torch.arange(4.0))
            nn.init.zeros_(self.weight)

    save_file({"weight": torch.tensor([1.0, 2.0, 3.0])}, tmp_path / "model.safetensors")
    model = on_meta(Angles)
    shardwise.load(model, tmp_path)
    assert model.table.tolist() == [0, 1, 2, 3]
    assert model.weight.tolist() == [1, 2, 3]  # reset_parameters could not harm what is loaded


def test_buffers_that_differ_between_ranks_are_refused(worlds, plain):
    require_same_error(worlds(2).run(on_ranks.buffers_differ, plain[0]), "RankMismatchError", "blocks.0.angles")


def test_missing_tensors_of_a_plain_module_are_reset(plain):
    directory, expected = plain
    model = nn.Module()
    model.scale = nn.Parameter(torch.zeros(4, 3, device="meta"))
    model.head = on_meta(lambda: nn.Linear(4, 6))
    ignore = shardwise.options.Ignore(("blocks.*",))
    with pytest.raises(KeyMismatchError, match="missing 2"):
        shardwise.load(model, directory, on_unexpected=ignore)
    report = shardwise.load(model, directory, on_missing=Initialize(("head.*",)), on_unexpected=ignore)
    assert report.initialized == ("head.weight", "head.bias")
    assert model.head.weight.abs().max() <= 0.5  # kaiming uniform with a = √5: ±1/√4
    assert model.head.weight.unique().numel() == 24
    assert torch.equal(model.scale, expected["values"]["scale"])


def test_a_missing_parameter_that_nothing_initializes_is_refused(tmp_path):
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = nn.Module()
    model.scale = nn.Parameter(torch.zeros(4, device="meta"))
    with pytest.raises(KeyMismatchError, match=r"uninitialized 1\s+scale: nothing initializes it"):
        shardwise.load(model, tmp_path, on_missing=Initialize(("*",)))


def test_missing_adapters_and_copies_of_peft_are_refused(tmp_path):
    """`_init_weights` would draw all of them, also lora_B, which is zero in a new adapter."""
    config = LoraConfig(target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"])
    model = on_meta(lambda: get_peft_model(small_qwen3(num_hidden_layers=1), config))
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    added = [name for name in model.state_dict() if "lora_" in name or ".modules_to_save." in name]
    wanted = rf"(?s)uninitialized {len(added)} .*tuning=Lora\(config\)"
    with pytest.raises(KeyMismatchError, match=wanted) as caught:
        shardwise.load(model, tmp_path, on_missing=Initialize(("*",)))
    assert all(f"{name}: nothing initializes it" in str(caught.value) for name in added)


def test_a_tensor_kept_as_a_plain_attribute_is_not_left_on_meta(plain):
    model = on_meta(Plain)
    model.blocks[0].mask = torch.zeros(3, device="meta")
    with pytest.raises(KeyMismatchError, match=r"blocks\.0\.mask: still on meta"):
        shardwise.load(model, plain[0], buffers={"*.angles": angles})


def test_a_checkpoint_in_memory(plain):
    directory, expected = plain
    with open(os.path.join(directory, "weights.safetensors"), "rb") as file:
        reader = MemoryReader({"weights.safetensors": file.read()})
    for _ in range(2):  # a reader that was given stays open
        model = Plain()
        shardwise.load(model, reader)
        assert truth.differences(truth.snapshot(model), expected) == []


def test_strided_and_offset_memory_is_filled_in_place(tmp_path):
    values = torch.arange(12.0).view(3, 4)
    save_file({"w": values}, tmp_path / "model.safetensors")
    base = torch.zeros(10, 10)
    model = nn.Module()
    model.w = nn.Parameter(base[2:8:2, 1:9:2])
    shardwise.load(model, tmp_path)
    assert torch.equal(base[2:8:2, 1:9:2], values)
    assert base.count_nonzero() == 11


def test_modules_that_keep_their_weights_in_a_list_too(tmp_path):
    """`nn.LSTM` has a flat list of its parameters beside the registry."""
    expected = nn.LSTM(4, 3, num_layers=2)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    model = on_meta(lambda: nn.LSTM(4, 3, num_layers=2))
    model.weight_hh_l1.requires_grad_(False)
    shardwise.load(model, tmp_path)
    assert not model.weight_hh_l1.requires_grad
    inputs = torch.rand(5, 4)
    assert torch.equal(model(inputs)[0], expected(inputs)[0])


def test_an_error_of_a_callable_is_a_shardwise_error(plain):
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        shardwise.load(on_meta(Plain), plain[0], buffers={"*.angles": lambda module: 1 / 0})


# transformers' models through `load`


def test_a_model_built_on_meta_by_the_user(qwen3, tied_qwen3):
    for directory, tied in ((qwen3, False), (tied_qwen3, True)):
        config = small_qwen3(tie_word_embeddings=tied).config
        model = on_meta(lambda config=config: Qwen3ForCausalLM(config))
        shardwise.load(model, directory)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
        assert truth.differences(truth.snapshot(model), truth.snapshot(small_qwen3(tie_word_embeddings=tied))) == []


def test_a_model_made_real_by_to_empty_gets_its_buffers_and_ties_back(tied_qwen3):
    expected = small_qwen3(tie_word_embeddings=True)
    model = on_meta(lambda: Qwen3ForCausalLM(expected.config)).to_empty(device="cpu")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.rotary_emb.inv_freq.fill_(float("nan"))
    shardwise.load(model, tied_qwen3)
    assert truth.differences(truth.snapshot(model), truth.snapshot(expected)) == []


def test_a_tied_model_refuses_two_different_values(tied_qwen3, changed):
    def differ(tensors):
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}

    model = on_meta(lambda: Qwen3ForCausalLM(small_qwen3(tie_word_embeddings=True).config))
    with pytest.raises(KeyMismatchError, match="the model ties this tensor"):
        shardwise.load(model, changed(tied_qwen3, differ))


def test_a_compiled_model_keeps_its_conversions(mixtral):
    expected = zoo.build(MIXTRAL)
    model = torch.compile(on_meta(lambda: type(expected)(expected.config)), backend="eager")
    shardwise.load(model, mixtral)
    assert truth.differences(truth.snapshot(model), truth.snapshot(expected)) == []


def test_a_wrapped_library_model_is_initialized_by_its_own_rules(qwen3, tmp_path):
    """A transformers model inside a plain module: buffers recomputed, no conversion needed."""
    inner = small_qwen3()
    save_file({f"net.{name}": value for name, value in inner.state_dict().items()}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.net = on_meta(lambda: Qwen3ForCausalLM(inner.config))
    report = shardwise.load(model, tmp_path)
    assert report.recomputed[0] == "net.model.rotary_emb.inv_freq"
    assert truth.differences(truth.snapshot(model.net), truth.snapshot(inner)) == []


# Files that lie (``tests/files`` has every way; here is that `load` refuses before it touches the model)


def lying(tmp_path, spoil):
    file = tmp_path / "model.safetensors"
    save_file({"scale": torch.ones(4, 3)}, file)
    file.write_bytes(spoil(file.read_bytes()))
    model = nn.Module()
    model.scale = nn.Parameter(torch.full((4, 3), 7.0))
    return model


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data.replace(b"F32", b"F33"),
        lambda data: data.replace(b"[0,48]", b"[4,52]"),
        lambda data: b"",
    ],
)
def test_a_file_that_lies_is_refused_before_the_model_is_touched(tmp_path, spoil):
    model = lying(tmp_path, spoil)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        shardwise.load(model, tmp_path)
    assert (model.scale == 7).all()


def test_a_path_that_is_not_there_is_refused():
    with pytest.raises(StorageError, match="no such"):
        shardwise.load(Plain(), "/nowhere/at/all")


def with_a_weight(folder, **more):
    """A model, and the file of its weight and more."""
    save_file({"weight": torch.ones(3), **more}, folder / "model.safetensors")
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3))
    return model


def test_buffers_that_no_file_can_hold_are_no_obstacle(tmp_path):
    model = with_a_weight(tmp_path)
    model.register_buffer("rotation", torch.zeros(2, dtype=torch.complex128), persistent=False)
    assert shardwise.load(model, tmp_path).kept == ("rotation",)
    model.register_buffer("stored", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ShardingError, match="stored is torch.complex128, which safetensors cannot hold"):
        shardwise.load(model, tmp_path)


def test_extra_state_is_named_for_what_it_is(tmp_path):
    model = with_a_weight(tmp_path, _extra_state=torch.ones(1))
    with pytest.raises(KeyMismatchError, match="_extra_state .extra state of a module, which cannot be loaded yet"):
        shardwise.load(model, tmp_path)


def test_an_expanded_buffer_gets_memory_of_its_own(tmp_path):
    model = with_a_weight(tmp_path)
    model.register_buffer("positions", torch.arange(4).expand(2, 4), persistent=False)
    shardwise.load(model, tmp_path, buffers={"positions": lambda module: torch.arange(8).view(2, 4)})
    assert model.positions.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_the_dtype_that_gradients_were_given_stays(dtype):
    model = on_meta(lambda: nn.Linear(4, 4, dtype=torch.bfloat16))
    model.weight.grad_dtype = dtype
    model.weight.note = "kept"
    values = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in model.state_dict().items()}
    shardwise.load(model, MemoryReader({"model.safetensors": save(values)}))
    assert (model.weight.grad_dtype, model.bias.grad_dtype) == (dtype, torch.bfloat16)
    assert model.weight.note == "kept"
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad.dtype == (dtype or torch.bfloat16)


class _Hooked(torch.Tensor):
    """A subclass as quantizing libraries have them: FSDP2 asks it what to gather."""

    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        raise AssertionError


def test_tensors_of_a_subclass_on_meta_are_refused_by_name():
    """What gets memory is a plain tensor, and the hooks would be lost without a word."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].weight = nn.Parameter(torch.empty(4, 4, device="meta").as_subclass(_Hooked))
    assert type(model[1].weight) is _Hooked
    values = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    with pytest.raises(ShardingError, match=r"1\.weight: on meta, and a _Hooked, .* convert the model afterwards"):
        shardwise.load(model, MemoryReader({"model.safetensors": save(values)}))
    with pytest.raises(ShardingError, match=r"1\.weight: on meta, and a _Hooked"):
        shardwise.set_model_state_dict(model, values)
    assert all(tensor.is_meta for tensor in model.parameters())
