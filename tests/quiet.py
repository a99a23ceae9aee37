"""A worker, or a script, that says nothing but what it is asked."""

import warnings


def quieten() -> None:
    """Silence the warnings and bars of the libraries under test, and compute on one thread."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
