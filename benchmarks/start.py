"""From the start of a process to the first optimizer step on every rank, imports included, against TRL, accelerate.

Each arm is started as its users do, in fresh interpreters: shardwise by its command, ``shardwise train``; TRL by
torchrun and its own script with the same arguments, where each rank holds the whole model. Their first step is
done when its loss is printed. accelerate is a loop by hand, which needs neither TRL nor a tokenizer, in one
interpreter a rank, which is what its launcher makes, whose own time does not count. The commands compute in float32
unless told otherwise, accelerate in the stored dtype: so ``shardwise train`` also runs in bfloat16.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import meter
from benchmarks.training import BRING_UP, TRAIN, Job, batches, quieten

FIRST_TOKENS = 21
OURS, OURS_AS_STORED = "shardwise train", "shardwise train, in bfloat16"
TRL, ACCELERATE = "trl sft", "accelerate"
ARMS = (OURS, OURS_AS_STORED, TRL, ACCELERATE)

_LOOK_S = 0.02
_WORDS = 500


def start_once(arm: str, job: Job, ranks: int, timeout_s: float) -> float:
    """Seconds from the start of the first process until every rank has done its first step."""
    with tempfile.TemporaryDirectory(prefix="shardwise-start-") as folder:
        if arm != ACCELERATE:
            return _by_command(arm, job, ranks, Path(folder), timeout_s)
        told = {"arm": arm, "job": vars(job), "ranks": ranks, "store": f"{folder}/store"}
        began = meter.timestamp()
        processes = [_interpreter({**told, "rank": rank}) for rank in range(ranks)]
        try:
            answers = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{arm}: a rank failed")
    return max(float(text.split()[-1]) for text in answers) - began


def _by_command(arm: str, job: Job, ranks: int, folder: Path, timeout_s: float) -> float:
    model, data = with_tokenizer(Path(job.folder), folder / "model"), folder / "data"
    drawn = random.Random(0)
    rows = [" ".join(f"w{drawn.randrange(_WORDS)}" for _ in range(job.tokens - 1)) for _ in range(4 * ranks)]
    data.mkdir()
    (data / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    given = [f"--model_name_or_path={model}", f"--dataset_name={data}", f"--output_dir={folder / 'out'}"]
    given += [f"--per_device_train_batch_size={job.rows}", "--max_steps=1", "--logging_steps=1", "--report_to=none"]
    given += ["--use_peft", "--lora_target_modules=all-linear", "--lora_r=16"] * job.lora
    given += ["--save_strategy=no", "--bf16=true" if arm == OURS_AS_STORED else "--bf16=false"]
    if arm == TRL:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*torchrun, "-m", "trl.scripts.sft", "--use_cpu", *given]
    else:
        program = "from shardwise.cli import main; main()"
        command = ["-c", program, "train", *given, "--nproc-per-node", str(ranks)]
    with (folder / "log").open("w+") as log:
        began = meter.timestamp()
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=_environment())
        try:
            while "'loss'" not in (folder / "log").read_text():
                if process.poll() is not None or meter.timestamp() - began > timeout_s:
                    log.seek(0)
                    raise RuntimeError(f"{arm}: no step within {meter.timestamp() - began:.0f} s\n{log.read()}")
                time.sleep(_LOOK_S)
            taken = meter.timestamp() - began
            if arm == TRL:
                process.terminate()  # torchrun ends its ranks
            if process.wait(timeout_s) and arm != TRL:
                raise RuntimeError(f"{arm}: it failed after the step")
        finally:
            process.kill()
            process.wait()
    return taken


def with_tokenizer(folder: Path, into: Path) -> Path:
    """The same files in another folder, with a tokenizer of some words beside them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).symlink_to(path)
    words = {f"w{number}": number for number in range(_WORDS)} | {"<unknown>": _WORDS, "<end>": _WORDS + 1}
    known = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unknown>"}
    PreTrainedTokenizerFast(tokenizer_object=known, **special).save_pretrained(into)
    return into


def _interpreter(told: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.start", json.dumps(told)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def main(argv: Sequence[str]) -> None:
    """What an interpreter of :func:`start_once` does; prints when the first step has been done."""
    told = json.loads(argv[0])
    job, ranks = Job(**told["job"]), told["ranks"]
    import accelerate  # noqa: F401 - what its users import
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(told["store"], ranks), rank=told["rank"], world_size=ranks)
    quieten()
    TRAIN[ACCELERATE](BRING_UP[ACCELERATE](job), batches(job, 1, dist.get_rank()))
    print(meter.timestamp(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
