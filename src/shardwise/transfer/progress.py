"""Progress bar of bytes."""

from tqdm import tqdm
from transformers.utils import logging as hf_logging


def progress_bar(label: str, total_bytes: int, *, enabled: bool) -> tqdm:
    """Return a bar of bytes with rate and time left, for :meth:`tqdm.tqdm.update`.

    No output if there is no terminal, or transformers' bars are off
    (``transformers.utils.logging.disable_progress_bar``).
    """
    return tqdm(
        total=total_bytes,
        desc=label,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=None if enabled and hf_logging.is_progress_bar_enabled() else True,  # None: only without a terminal
        leave=False,
        dynamic_ncols=True,
    )
