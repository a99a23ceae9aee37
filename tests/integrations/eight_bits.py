"""A training by torchao's AdamW8bit in the Trainer."""

from typing import Any

from tests.peers import use_peers


def trained_twice(folder: str, arguments: dict[str, Any], resume: str) -> list[list[tuple[float, float]]]:
    """Losses and norms of a training, and of its end once more, from a checkpoint."""
    use_peers("torchao")
    import torch
    from tests.integrations.runs import Run, train

    torch.compiler.set_stance("force_eager")
    run = Run(folder, arguments=arguments | {"optim": "adamw_torch_8bit"})
    elsewhere = run.arguments | {"output_dir": f"{arguments['output_dir']}/again"}
    return [train(each).steps for each in (run, run.but(resume=resume, arguments=elsewhere))]
