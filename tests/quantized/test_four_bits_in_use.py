"""A base in four bits is cast, copied, compiled, saved and refused as users do it; nothing goes wrong silently."""

import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from tests.quantized import four_bits_in_use
from tests.quantized.four_bits import draw, layers_of
from tests.quantized.requirements import needs_packed_shards
from tests.quantized.test_four_bits import written
from tests.support.world import agreed, run_forked
from tests.truth import require_equal
from transformers import (
    AutoModelForCausalLM,
    FalconMambaConfig,
    FalconMambaModel,
    HrmTextConfig,
    HrmTextForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersEncoderModel,
    T5Config,
    T5EncoderModel,
)
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

import shardwise
from shardwise.core.tensors import Code, Form4
from shardwise.models import activations
from shardwise.models.four_bit import config
from shardwise.options import LoadOptions, Nf4

NESTED = Nf4(double_quant=True)
QUIET = LoadOptions(progress=False)
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("plain"))


def require(told: tuple[str, str], kind: str, message: str) -> None:
    assert told[0] == kind, told
    assert re.search(message, told[1]), told


@needs_packed_shards
def test_an_error_of_one_rank_is_raised_on_all(worlds, plain):
    first = agreed(worlds(2), four_bits_in_use.faults, str(plain))
    require(first["other blocks"], "RankMismatchError", r"on rank 1 .*quantization .*block_size=32.* against .*=64")
    require(first["fails alone"], "CheckpointError", r"^rank 1: out of memory \(no room for the scales\)\. See")
    require(first["merged"], "ConfigError", "is in four bits, and cannot be merged into in place. Save the")


@pytest.mark.parametrize("form", [Form4.NF4, Form4.FP4, Code.E2M1], ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_looked_up_in_parts(monkeypatch, form, dtype):
    """In parts of 256 bytes, of which the last one is smaller, the bits are those of single codes times scales."""
    packed = torch.randint(0, 256, (3, 5, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(3, 5, 6, generator=torch.Generator().manual_seed(1))
    scales[0, 0, :2] = torch.tensor([torch.inf, torch.nan])
    halves = [packed & 15, packed >> 4] if isinstance(form, Code) else [packed >> 4, packed & 15]
    single = torch.tensor(form.codebook)[torch.stack(halves, -1).int()].view(3, 5, 6, 32)
    expected = (single * scales.unsqueeze(-1)).view(3, 5, 192).to(dtype)
    monkeypatch.setattr(config, "_PART_BYTES", 256)
    config.look_up(packed, scales, 32, form, dtype)  # keeps the table
    with activations._LiveBytes((packed, scales)) as taken:
        found = config.look_up(packed, scales, 32, form, dtype)
    assert found.view(torch.uint8).equal(expected.view(torch.uint8))
    assert config.scratch_bytes(packed) == 12 * 256
    assert found.nbytes + 12 * 256 // 2 < taken.peak <= found.nbytes + 12 * 256


def test_the_memory_of_dequantizing_is_part_of_an_estimate():
    packed, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 4)
    with activations._LiveBytes((packed, scales)) as taken:
        weights = config.dequantize_four_bits(packed, scales, 32, "nf4", torch.bfloat16)
    assert (taken.live, taken.peak) == (weights.nbytes, weights.nbytes + 12 * packed.numel())


def test_an_older_torch_is_refused_before_anything_is_sharded(worlds, plain, tmp_path):
    torch.save(shardwise.from_pretrained(str(plain), quantization=NESTED), tmp_path / "live")
    told = agreed(worlds(2), four_bits_in_use.refused, str(plain), str(tmp_path / "live"))
    for what in ("loaded", "sharded"):
        require(
            told[what], "ConfigError", r"^torch 2\.12.*q_proj\.weight is torch\.uint8.*need torch 2\.13 or newer"
        )
    assert not told["changed"]


@needs_packed_shards
def test_mixed_precision_leaves_packed_weights_as_they_are(worlds, plain):
    mixed, same = (worlds(2).run(four_bits_in_use.logits, str(plain), dtype) for dtype in (torch.bfloat16, None))
    for one, other in zip(mixed, same, strict=True):
        assert torch.equal(one, other)


@needs_packed_shards
@pytest.mark.slow
@pytest.mark.distributed
def test_blocks_are_compiled_and_models_of_bitsandbytes_are_not_saved_without_scales(plain, tmp_path):
    first, second = run_forked(2, four_bits_in_use.beside_bitsandbytes, str(plain), str(tmp_path))
    assert first == second
    assert first["compiled"] == {"logits": 0, "gradients": 0}
    for what in ("stock saved", "stock told"):
        require(first[what], "ConfigError", r"q_proj\.weight is a Params4bit of bitsandbytes.*save_pretrained")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own compiler does
def test_compiled(plain):
    """What is made of bytes is not looked into: numpy makes it, or a kernel."""
    model = shardwise.from_pretrained(str(plain), quantization=NESTED, dtype=torch.float32)
    rows = torch.linspace(-1, 1, 3 * 128).view(3, 128)
    layer = model.model.layers[0].mlp
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(rows), layer(rows))


def test_a_cast_passes_over_what_numbers_are_made_of(plain):
    model = shardwise.from_pretrained(str(plain), quantization=NESTED)
    before = {name: layer.dequantize() for name, layer in layers_of(model)}
    model.bfloat16()
    for _, layer in layers_of(model):
        layer.half()
    assert all(torch.equal(layer.dequantize(), before[name]) for name, layer in layers_of(model))
    assert model.model.layers[0].input_layernorm.weight.dtype is torch.bfloat16


def test_a_move_that_fails_loses_no_scales(plain):
    def run_out_of_memory(tensor):
        raise MemoryError

    model = shardwise.from_pretrained(str(plain), quantization=NESTED)
    _, layer = next(layers_of(model))
    before = layer.dequantize()
    with pytest.raises(MemoryError):
        layer._apply(run_out_of_memory)
    assert torch.equal(layer.dequantize(), before)


def test_autograd_saves_only_tensors_of_the_model(plain):
    """Scales that were unpacked would be a sixteenth of a byte for each weight, of all layers at once."""
    model = shardwise.from_pretrained(str(plain), quantization=NESTED)
    rows = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    kept: set[object] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.add((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(inputs_embeds=rows)
    codes = {tuple(layer.weight_scales.shape) for _, layer in layers_of(model)}
    assert {(shape, torch.uint8) for shape in codes} <= kept
    assert not {(shape, torch.float32) for shape in codes} & kept


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_one_in_four_bits(plain, copied_by):
    model = adapted(plain, NESTED)
    copied = copied_by(model)
    assert torch.equal(copied(TOKENS).logits, model(TOKENS).logits)
    for (_, layer), (_, own) in zip(layers_of(copied), layers_of(model), strict=True):
        assert type(layer) is type(own)
        assert layer.weight.data_ptr() != own.weight.data_ptr()
        # what PEFT asks for
        assert (layer.weight.quant_type, layer.weight.compress_statistics) == ("nf4", True)


def adapted(folder: Path, quantization: Nf4, **options: object) -> torch.nn.Module:
    """With a LoRA that is not zero."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = shardwise.from_pretrained(
        str(folder), quantization=quantization, tuning=shardwise.Lora(lora), options=QUIET, **options
    )
    draw([parameter for parameter in model.parameters() if parameter.requires_grad])
    return model


def test_nothing_is_merged_into_four_bits(plain):
    model = adapted(plain, NESTED)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(shardwise.ConfigError, match=r"q_proj: is in four bits, and cannot be merged into"):
            merge()
    wanted = shardwise.from_pretrained(str(plain), quantization=NESTED)
    assert torch.equal(model.unload()(TOKENS).logits, wanted(TOKENS).logits)


def test_adapters_that_transformers_puts_on_are_saved(plain, tmp_path):
    base, again = (shardwise.from_pretrained(str(plain), quantization=Nf4()) for _ in range(2))
    base.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    base.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(loaded(TOKENS).logits, base(TOKENS).logits)


def test_nothing_in_four_bits_is_dequantized_in_its_place(plain):
    model = shardwise.from_pretrained(str(plain), quantization=Nf4())
    words = r"dequantize: .*from_pretrained\(folder, quantization='dequantize'"
    with pytest.raises(shardwise.ConfigError, match=words):
        model.dequantize()


def test_save_pretrained_of_transformers_names_shardwise_save(plain, tmp_path):
    model = shardwise.from_pretrained(str(plain), quantization=Nf4())
    with pytest.raises(ValueError, match=r"shardwise\.save\(model, folder\).* is not serializable"):
        model.save_pretrained(tmp_path / "out")


def test_weights_of_other_dtypes_cannot_be_quantized(plain):
    with pytest.raises(shardwise.ConfigError, match=r"is of torch\.float64, which cannot be quantized"):
        shardwise.from_pretrained(str(plain), quantization=Nf4(), dtype=torch.float64)


def test_a_load_that_is_refused_leaves_nothing_behind(plain, tmp_path):
    model = shardwise.from_pretrained(str(plain), quantization=NESTED)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = AutoModelForCausalLM.from_pretrained(plain).state_dict()
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(shardwise.KeyMismatchError, match=r"model\.norm\.weight"):
        shardwise.load(model, tmp_path)
    require_equal(model.state_dict(), before)


READING_WEIGHTS = [
    (T5EncoderModel, T5Config(vocab_size=97, d_model=64, d_kv=32, num_heads=2, d_ff=64, num_layers=1)),
    (FalconMambaModel, FalconMambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=1, time_step_rank=64)),
]
"""T5 casts to the dtype of a weight. FalconMamba multiplies with one, unless its config is of a packed model."""


@pytest.mark.parametrize(("kind", "config"), READING_WEIGHTS, ids=["T5", "FalconMamba"])
def test_classes_that_read_weights_answer_as_on_their_numbers(tmp_path, kind, config):
    torch.manual_seed(0)
    stock = kind(config)
    stock.save_pretrained(tmp_path / "plain")
    model = shardwise.from_pretrained(tmp_path / "plain", quantization=Nf4(), options=QUIET)
    shardwise.save(model, tmp_path / "packed")
    numbers = shardwise.from_pretrained(tmp_path / "packed", quantization="dequantize", options=QUIET)
    torch.testing.assert_close(model(TOKENS).last_hidden_state, numbers(TOKENS).last_hidden_state)
    assert "_is_quantized" not in json.loads((tmp_path / "packed/config.json").read_text())
    skipped = HfQuantizer.get_modules_to_not_convert(stock, None, stock._keep_in_fp32_modules)
    linear = [name for name, module in stock.named_modules() if isinstance(module, torch.nn.Linear)]
    assert [name for name in linear if should_convert_module(name, skipped)] == [
        name for name, _ in layers_of(model)
    ]


def test_a_class_that_casts_rows_to_bytes_is_an_error_with_the_remedy(tmp_path):
    sizes = {"vocab_size": 97, "d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 64, "num_layers": 1}
    sizes |= {"num_decoder_layers": 1, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
    SwitchTransformersEncoderModel(SwitchTransformersConfig(**sizes)).save_pretrained(tmp_path)
    model = shardwise.from_pretrained(tmp_path, quantization=Nf4(), options=QUIET)
    with pytest.raises(shardwise.ConfigError, match=r"gets torch\.uint8 rows.*skip_modules, as 'wo'"):
        model(TOKENS)
    model = shardwise.from_pretrained(tmp_path, quantization=Nf4(skip_modules=("wo",)), options=QUIET)
    assert model(TOKENS).last_hidden_state.isfinite().all()


def test_blocks_of_another_size_are_saved_and_read_as_they_are(tmp_path):
    base = written(tmp_path / "plain", hidden_size=96, intermediate_size=160)
    quantization = Nf4(block_size=32, double_quant=True)
    model = shardwise.from_pretrained(base, quantization=quantization, options=QUIET)
    for names in ("hub", "internal"):
        cast = {"names": names, "dtype": torch.bfloat16}
        with pytest.raises(shardwise.ConfigError, match="bfloat16: 4-bit weights and their scales are saved unch"):
            shardwise.save(model, tmp_path / names, **cast)
        with pytest.raises(shardwise.ConfigError, match="bfloat16: 4-bit weights and their scales are saved unch"):
            next(iter(shardwise.iter_hf_tensors(model, **cast)))
        assert not (tmp_path / names).exists()
        shardwise.save(model, tmp_path / names, names=names)
        shardwise.verify(tmp_path / names)
        again = shardwise.from_pretrained(tmp_path / names, options=QUIET)
        require_equal(again.state_dict(), model.state_dict())


def test_layers_that_files_have_joined_are_saved_by_their_own_names(tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1]}
    HrmTextForCausalLM(HrmTextConfig(**sizes, **heads)).save_pretrained(tmp_path / "plain")
    model = shardwise.from_pretrained(tmp_path / "plain", quantization=Nf4(), options=QUIET)
    with pytest.raises(
        shardwise.ConfigError, match=r"gate_proj\.weight: is in four bits, .* \(.*gate_up_proj\.weight\)"
    ):
        shardwise.save(model, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()
    shardwise.save(model, tmp_path / "own", names="internal")
    require_equal(shardwise.from_pretrained(tmp_path / "own", options=QUIET).state_dict(), model.state_dict())


def test_biases_of_packed_layers_are_trained(tmp_path):
    base = written(tmp_path, attention_bias=True)
    tuning = shardwise.Lora(LoraConfig(r=2, target_modules=["q_proj"], bias="lora_only"))
    model = shardwise.from_pretrained(base, quantization=Nf4(), tuning=tuning, options=QUIET)
    model(TOKENS, labels=TOKENS).loss.backward()
    biases = {
        name: one.grad for name, one in model.named_parameters() if name.endswith("bias") and one.requires_grad
    }
    assert len(biases) == 2
    assert all(gradient.any() for gradient in biases.values())
