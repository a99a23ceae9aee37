"""``make fuzz``: libFuzzer, by atheris, guided by which lines of shardwise an input reaches.

Each target runs in a process of its own, from its sound inputs on, for its share of the seconds. An input after
which something does not hold is kept in ``--found``, and shown; the exit status is then 1. ::

    make fuzz ARGS="--seconds 600 --only archive --only pickle"
    make fuzz ARGS="--again fuzz-found/crash-..." with --only TARGET: that input alone
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("header", "index", "archive", "pickle", "metadata", "chunks")
LONGEST_BYTES = 1 << 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--only", action="append", choices=NAMES, default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="where inputs that break go")
    parser.add_argument("--again", type=Path, help="an input that broke")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = given.only or list(NAMES)
    if given.inside is not None:
        _fuzz(given.inside, given.found, max(1, given.seconds // len(chosen)), given.seed, given.again)
        return 0
    given.found.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in chosen:
        print(f"{name}: {max(1, given.seconds // len(chosen))} s, seed {given.seed}", flush=True)
        command = [sys.executable, "-m", "tests.fuzz.run", *sys.argv[1:], "--inside", name]
        with tempfile.TemporaryDirectory(prefix="shardwise-fuzz-") as place:  # libFuzzer leaves without cleaning up
            if subprocess.run(command, env={**os.environ, "TMPDIR": place}).returncode:
                failed.append(name)
    print(f"broken: {', '.join(failed)}" if failed else f"nothing broke: {', '.join(chosen)}")
    return 1 if failed else 0


def _fuzz(name: str, found: Path, seconds: int, seed: int, again: Path | None) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["shardwise"], enable_loader_override=False):
        from tests.fuzz.mutating import TOKENS
        from tests.fuzz.targets import targets

    target = targets()[name]
    with target.folder() as folder, tempfile.TemporaryDirectory() as corpus:
        for number, content in enumerate(target.seeds):
            Path(corpus, f"seed-{number}").write_bytes(content)
        words = Path(corpus).with_suffix(".words")
        words.write_text("".join('"' + "".join(f"\\x{code:02x}" for code in token) + '"\n' for token in TOKENS))

        def one(content: bytes) -> None:
            target.check(folder, content)

        options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={found}/", f"-dict={words}"]
        options += [
            f"-max_len={LONGEST_BYTES}",
            "-timeout=20",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
            "-verbosity=0",
        ]
        inputs = [corpus] if again is None else [str(again)]
        atheris.Setup([sys.argv[0], *options, *inputs], one)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
