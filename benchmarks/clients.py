"""Reading ranges over HTTP into memory that is there: our transport beside obstore's.

One process reads a file from a server on this machine, in requests of 8 MiB, eight in flight, into one buffer that
has been touched. Ours receives into it; obstore (``object_store`` in Rust) hands out memory of its own, which is
copied. Told are seconds, seconds of the client's processor, and what it came to hold at most beside the buffer. The
server is in Python and shares the processors, so seconds tell less than processor time does.

    pip install obstore
    python -m benchmarks.clients
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.place import commit, machine
from tests.harness.http_store import HttpStoreProcess

REQUEST_BYTES = 8 << 20
IN_FLIGHT = 8


def ours(url: str, file: str, ranges: list[tuple[int, int]], memory: memoryview) -> None:
    """Into the buffer, by the reader that loads use."""
    from shardwise.storage.reading.remote_reader import RemoteReader

    with RemoteReader(url, concurrency=IN_FLIGHT) as reader, ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(lambda item: reader.read_into(file, item[0], memory[item[0] : item[1]]), ranges))


def obstore(url: str, file: str, ranges: list[tuple[int, int]], memory: memoryview) -> None:
    """Handed out, then copied."""
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(url, client_options={"allow_http": True})

    def fetch(item: tuple[int, int]) -> None:
        memory[item[0] : item[1]] = memoryview(store.get_range(file, start=item[0], end=item[1]))

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(fetch, ranges))


CLIENTS: dict[str, Callable[[str, str, list[tuple[int, int]], memoryview], None]] = {
    "shardwise": ours,
    "obstore": obstore,
}


def measure(name: str, url: str, file: str, nbytes: int) -> dict[str, float]:
    """In a process of its own: (seconds, processor seconds, MiB beside the buffer)."""
    memory = memoryview(bytearray(nbytes))
    for page in range(0, nbytes, 4096):
        memory[page] = 1
    ranges = [(start, min(start + REQUEST_BYTES, nbytes)) for start in range(0, nbytes, REQUEST_BYTES)]
    CLIENTS[name](url, file, ranges[:2], memory)  # imports, connections
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    CLIENTS[name](url, file, ranges, memory)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor_s": used, "beside_mib": (after.ru_maxrss - before.ru_maxrss) / 1024}


def main() -> None:
    """Measure both in turn, and write the outcome to ``results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_bytes(os.urandom(given.mib << 20))
        with (
            HttpStoreProcess(folder) as store,
            multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
        ):
            for _ in range(given.repeats):
                for name, of in runs.items():
                    of.append(pool.apply(measure, (name, store.url, "file", given.mib << 20)))
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.clients --mib {given.mib} --repeats {given.repeats}",
        "commit": commit(),
        "machine": machine(),
        "medians": {
            name: {what: round(statistics.median(run[what] for run in of), 3) for what in of[0]}
            for name, of in runs.items()
        },
        "runs": runs,
    }
    text = json.dumps(results, indent=1) + "\n"
    (Path(__file__).parent / "results" / f"clients-{results['date'][:10]}.json").write_text(text)
    print(json.dumps(results["medians"], indent=1))


if __name__ == "__main__":
    main()
