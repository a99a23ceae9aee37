"""Models with code of their own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from transformers import dynamic_module_utils

PACKAGE = "transformers_modules"


@contextmanager
def modules_in(folder: str) -> Iterator[None]:
    """Have transformers copy the code of models into a folder and import it from there, within the block.

    A process that has imported such code before would look for more of it beside the former.
    """
    places = [place for place in sys.path if not Path(place, PACKAGE).is_dir()]
    with (
        mock.patch.object(dynamic_module_utils, "HF_MODULES_CACHE", folder),
        mock.patch.object(sys, "path", places),
    ):
        _forget()
        yield
        _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
