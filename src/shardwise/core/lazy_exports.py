"""Lazy imports of the names in the stub (``.pyi``) of a module.

Type checkers read the same file, so there is one list of public names. Laziness keeps ``import shardwise`` fast,
and ``shardwise inspect`` free of torch.
"""

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def lazy_exports(
    package: str, init_file: str, elsewhere: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package, from the stub of ``init_file``.

    The error for an unknown name suggests the package of ``elsewhere`` that has it.
    """
    homes = stub_imports(init_file)

    def get(name: str) -> Any:
        if name in homes:
            home = homes[name]
            module = importlib.import_module(f"{package}.{name}" if home == package else home)
            value = module if home == package else getattr(module, name)
            setattr(sys.modules[package], name, value)
            return value
        for other in elsewhere:
            if not name.startswith("_") and name in importlib.import_module(other).__all__:
                raise AttributeError(f"module {package!r} has no attribute {name!r}; it is {other}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    names = sorted(homes)
    return get, lambda: names, names


def import_object(place: str) -> Any:
    """Import an object by ``package.module:name``, or a module by ``package.module``.

    ``tests/test_code_rules.py`` imports every entry of the tables that use this.

    Raises:
        ConfigError: it does not exist, or needs a package that is not installed.
    """
    module, _, name = place.partition(":")
    try:
        imported = importlib.import_module(module)
        return getattr(imported, name) if name else imported
    except (ImportError, AttributeError) as error:
        from shardwise.core.errors import ConfigError  # not needed by ``import shardwise``

        raise ConfigError(
            f"{place} is in a table of shardwise, and cannot be imported ({error}). Install what it imports, or "
            "correct the line"
        ) from error


def stub_imports(init_file: str) -> dict[str, str]:
    """Return the module that each name is imported from in the stub of ``init_file``."""
    stub = ast.parse(Path(init_file).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
