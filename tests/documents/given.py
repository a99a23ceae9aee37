"""Code that is run before a block of a page, by page and number of the block."""

_TRAINED = """
import torch, shardwise
model = shardwise.from_pretrained("base", dtype="float32")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
optimizer.step()
optimizer.zero_grad()
"""

_OWN = """
import torch, shardwise
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)
    @classmethod
    def from_pretrained(cls, place):
        return cls()
"""

_ROWS = """
import torch
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
"""

_ENGINE = """
class Engine:
    def load_weight(self, key, tensor):
        assert tensor.device.type != "meta"
    def load_weights(self, weights):
        return {key for key, tensor in weights}
engine = engine_model = Engine()
"""

_TRAINER_CHECKPOINT = """
import pathlib
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
plain = AutoModelForCausalLM.from_pretrained("base", dtype="float32")
args = TrainingArguments("run", max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
trainer = Trainer(model=plain, args=args, train_dataset=rows)
trainer.train()
place = pathlib.Path("run/checkpoint-1").rename("run/checkpoint-500")
place.joinpath("optimizer.pt").unlink()  # of one process, without names; several save it so:
shardwise.save_accelerate_optimizer(model, optimizer, place, "full")
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
torch.save(scheduler.state_dict(), place / "scheduler.pt")
"""

_LORA = """
import torch, shardwise
from peft import LoraConfig
config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
model = shardwise.from_pretrained("base", tuning=shardwise.Lora(config))
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.ones_(parameter)
"""

_GPT_OSS = """
import pathlib
from tests.quantized.stored_experts import make_gpt_oss
place = pathlib.Path("hub/models--openai--gpt-oss-20b")
for name in ("refs", "snapshots/" + 40 * "0"):
    (place / name).mkdir(parents=True)
(place / "refs/main").write_text(40 * "0")
make_gpt_oss(place / "snapshots" / (40 * "0"))
"""

GIVEN: dict[str, dict[int, str]] = {
    "README.md": {
        7: f"{_OWN}\nshardwise.save(MyModel().blocks, 'checkpoint', max_shard_size='5GB')\n"
        "import safetensors.torch as st\n"
        "tensors = {k: v for k, v in MyModel().state_dict().items() if not k.startswith('head')}\n"
        "st.save_file(tensors, 'checkpoint/model.safetensors')\n",
        8: _TRAINED,
        9: "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('base')",
        10: "import torch\nfrom peft import LoraConfig",
    },
    "four_bits.md": {2: _GPT_OSS},
    "accelerate.md": {0: f"{_ROWS}\ndata = torch.utils.data.DataLoader(rows, batch_size=4)"},
    "checkpoints.md": {0: "import torch, shardwise\nname, loader = 'base', None"},
    "interchange.md": {0: f"{_TRAINED}{_ROWS}{_TRAINER_CHECKPOINT}"},
    "merge.md": {
        0: f"{_LORA}shardwise.save_adapter(model, 'out/last')",
        2: f"{_TRAINED}place = 'run/checkpoint-500'\nshardwise.save_accelerate_model(model, place, 'sharded')",
    },
    "meshes.md": {0: f"{_ROWS}\ndata = torch.utils.data.DataLoader(rows, batch_size=4)", 1: "folder = 'base'"},
    "save.md": {
        0: f"{_TRAINED}{_ENGINE}from transformers import AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained('base')"
    },
    "shard.md": {0: _OWN},
    "state.md": {0: _TRAINED},
    "trainer.md": {0: _ROWS},
    "trainers.md": {1: _ROWS, 0: _ROWS},
    "vllm.md": {0: f"{_ENGINE}{_LORA}"},
}
