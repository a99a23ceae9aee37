"""Functions that two ranks run on a base in four bits."""

from functools import partial
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from tests.loading.on_ranks import attempt
from tests.peers import use_peers
from tests.quantized.four_bits import answers_of, our_model, stock_model
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.options import LoadOptions, Nf4
from shardwise.transfer.move import LocalTensor

NESTED = True


def faults(folder: str) -> dict[str, Any]:
    """What goes wrong on one rank alone, or differs."""
    rank, told = torch.distributed.get_rank(), {}
    given = [Nf4(), Nf4(block_size=32)][rank]
    told["other blocks"] = attempt(partial(shardwise.from_pretrained, folder, quantization=given))

    of = LocalTensor.from_tensor

    def fail(tensor: torch.Tensor, name: str) -> Any:
        if rank == 1 and name.endswith("1.mlp.up_proj"):
            raise MemoryError("no room for the scales")
        return of(tensor, name)

    full_tensor = DTensor.full_tensor

    def fail_as_well(tensor: DTensor) -> torch.Tensor:  # ranks that wait in a collective are not told of it
        if rank == 1:
            raise MemoryError("no room for the scales")
        return full_tensor(tensor)

    with (
        mock.patch.object(LocalTensor, "from_tensor", fail),
        mock.patch.object(DTensor, "full_tensor", fail_as_well),
    ):
        told["fails alone"] = attempt(our_model, folder, "nf4", torch.float32, "flat", NESTED)

    lora = shardwise.Lora(LoraConfig(r=2, target_modules=["q_proj"]))
    adapted = our_model(folder, "nf4", torch.float32, "flat", False, tuning=lora)
    told["merged"] = attempt(adapted.merge_and_unload)
    return told


def refused(folder: str, path: str) -> dict[str, Any]:
    """Loads, and a live model that is sharded, where FSDP2 shards floating-point parameters only."""
    live = torch.load(path, weights_only=False)
    with mock.patch.object(torch, "__version__", "2.12.1+cpu"):
        told = {
            "loaded": attempt(our_model, folder, "nf4", torch.bfloat16, "flat"),
            "sharded": attempt(shardwise.shard, live),
        }
    told["changed"] = [name for name, each in live.named_parameters() if type(each) is not torch.nn.Parameter]
    return told


def beside_bitsandbytes(folder: str, out: str) -> dict[str, Any]:
    """Compiled blocks, with the kernels of bitsandbytes; and a model of its own layers."""
    use_peers("bitsandbytes")
    wanted = answers_of(our_model(folder, "nf4", torch.float32, "flat", NESTED))
    compiled = shardwise.from_pretrained(
        folder,
        quantization=Nf4(double_quant=NESTED, compute_dtype=torch.float32),
        dtype=torch.float32,
        options=LoadOptions(progress=False),
    )
    for block in compiled.model.layers:
        block.compile(backend="aot_eager")
    found = answers_of(compiled)
    stock = stock_model(folder, "nf4", torch.float32)
    return {
        "compiled": {name: float((found[name] - wanted[name]).abs().max()) for name in wanted},
        "stock saved": attempt(shardwise.save, stock, out),
        "stock told": attempt(lambda: list(shardwise.iter_hf_tensors(stock))),
    }


def logits(folder: str, param_dtype: torch.dtype | None) -> torch.Tensor:
    """Return the logits of a 4-bit model whose groups are gathered in a dtype."""
    sharding = shardwise.Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    model = shardwise.from_pretrained(folder, quantization=Nf4(), sharding=sharding, dtype=torch.bfloat16)
    return model(torch.arange(6)[None]).logits.detach()
