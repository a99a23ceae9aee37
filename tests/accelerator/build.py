"""Builds the simulated accelerator, once for each version of its source and of torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "simulated_npu"
_SOURCE = Path(__file__).with_name("native")
_FLAGS = (
    "-std=c++20",
    "-O0",  # builds in half the time; the kernels are torch's
    "-fPIC",
    "-fvisibility=hidden",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
    f"-DTORCH_EXTENSION_NAME={NAME}",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
)


class BuildError(RuntimeError):
    """The compiler failed; the text is what it printed."""


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Return the path of the library, which is built unless it is there.

    It lies in the environment, in a folder whose name depends on its source and on torch. Of several processes that
    need it at once, one builds it and the others wait.

    Raises:
        BuildError: a file does not compile.
    """
    files = sorted(_SOURCE.iterdir())
    digest = hashlib.sha256(repr((_FLAGS, torch.__version__, sys.version)).encode())
    for file in files:
        digest.update(file.read_bytes())
    cache = Path(sys.prefix) / "simulated-accelerator"
    library = cache / digest.hexdigest()[:16] / f"{NAME}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile([file for file in files if file.suffix == ".cpp"], Path(folder)).replace(library)
    return library


def _compile(files: list[Path], folder: Path) -> Path:
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    targets = [folder / f"{file.stem}.o" for file in files]
    commands = [
        [*_FLAGS, *includes, "-c", str(file), "-o", str(target)]
        for file, target in zip(files, targets, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    made = folder / f"{NAME}.so"
    paths = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    _run(["-shared", *map(str, targets), "-o", str(made), *paths, *libraries])
    return made


def _run(arguments: list[str]) -> None:
    done = subprocess.run([str(compiler()), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(done.stderr)
