"""The disk under Ray's session folder fills up under a steady load, a replica dies then, and there is room again.

    python -m tests.chaos.full_disk FILE FOLDER     # writes one JSON object; FOLDER is a small file system of its own

A program of its own, because Ray takes its folder from the environment once.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx2
import psutil

NUM_CLIENTS: Final = 4
LEFT_BYTES: Final = 40 * 2**20
"""Little enough to be said, even with what is given up then, and enough that it can be said."""

FULL_S: Final = 20.0
LIMIT_S: Final = 120.0
POLL_S: Final = 0.2


def main(results: Path, folder: Path) -> None:
    os.environ["RAY_TMPDIR"] = str(folder)
    results.write_text(json.dumps(run(folder)))


def run(folder: Path) -> dict[str, Any]:
    from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
    from holdfast.cluster.progress_bars import progress
    from holdfast.cluster.serve.serving import serving
    from holdfast.worker.config import ParallelConfig
    from tests.chaos.ray_nodes import loaded

    config = HoldfastConfig(
        cluster=ClusterConfig(replicas=2, port=0, http_port=0), parallel=ParallelConfig(num_threads=1)
    )
    with (
        progress(sys.stderr) as report,
        serving(config, report) as running,
        loaded(None, running.routers) as site,
    ):
        return _fill_and_empty(folder, running, site)


def _fill_and_empty(folder: Path, running: Any, site: Any) -> dict[str, Any]:
    from holdfast.cluster.serve import models
    from holdfast.cluster.serve.ray_internals import session_folder
    from tests.chaos.tally import Row

    site.do(site.load.judge_all(Row()))
    row, logs = Row(num_faults=1), session_folder() / "logs"
    assert logs.is_relative_to(folder)
    filler = folder / "filler"
    _fill(filler, leave=LEFT_BYTES)
    _until(lambda: models.list_models("holdfast")[0].num_on_full_disks == 2)
    _until(lambda: all(_warnings(router) for router in running.http))
    _until(lambda: not list(session_folder().glob("*.reserve")))  # `holdfast serve` gives it up
    found: dict[str, Any] = {"warnings": _warnings(running.http[0])}
    found["logged"] = _num_lines(logs, "Ray replaces nothing that ends")
    _fill(filler, leave=0)
    struck = site.do(site.load.under_way(NUM_CLIENTS - 1))
    struck_s = time.monotonic()
    _a_leader().kill()
    row.pauses_s += site.do(site.load.settle(struck_s, struck))
    while time.monotonic() < struck_s + FULL_S:
        site.do(site.load.under_way(NUM_CLIENTS - 1))  # of those that have begun since
        site.do(site.load.judge_all(row))
    found["num_replicas_while_full"] = _num_replicas(site)
    filler.unlink()
    emptied_s = time.monotonic()
    site.until(lambda load: len(load.replicas) == 2)
    found["replaced_after_s"] = time.monotonic() - emptied_s
    _until(lambda: not any(_warnings(router) for router in running.http))
    found["is_said_to_be_mended"] = _num_lines(logs, "has room again") > 0
    site.do(site.load.judge_all(row))
    return {**found, "row": asdict(row)}


def _fill(filler: Path, *, leave: int) -> None:
    """Until so many bytes are free. Others write there meanwhile."""
    with filler.open("ab") as file:
        while (free := shutil.disk_usage(filler.parent).free) > leave:
            with suppress(OSError):  # someone else was faster
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free - leave)


def _warnings(router: str) -> list[str]:
    answer = httpx2.get(f"http://{router}/health", timeout=10.0)
    return answer.json()["warnings"] if answer.content else []


def _num_replicas(site: Any) -> int:
    return len(site.until(lambda load: True).replicas)


def _num_lines(logs: Path, text: str) -> int:
    return sum(text in line for path in logs.glob("worker-*.err") for line in path.read_text().splitlines())


def _a_leader() -> psutil.Process:
    below = psutil.Process().children(recursive=True)
    return next(one for one in below if ":Replica" in " ".join(one.cmdline()))


def _until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > limit_s:
            raise TimeoutError
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
