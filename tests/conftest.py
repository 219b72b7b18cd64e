"""What every test shares: few threads, no hub, and a summary of what was left out."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController


STARTS_RAY = ("tests/integration/", "tests/chaos/test_steady_load.py", "tests/chaos/test_node_loss.py")
"""What `pytest -n` runs in one process, and first: it takes longest, and one machine has room for one Ray."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling":
    """A file is the unit, so that its fixtures are made once, and all that starts Ray is one unit."""
    from xdist.scheduler import LoadScopeScheduling

    class LoadFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(STARTS_RAY) else nodeid.split("::")[0]

    return LoadFiles(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests need a GPU; that they were left out is said at the end, never in silence."""
    items.sort(
        key=lambda item: item.get_closest_marker("cluster") is None
    )  # what starts Ray takes longest: it goes first
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


_LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        config = items[0].config
        config.stash.setdefault(_LEFT_OUT, []).extend(item.nodeid for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of `pytest -n` tells the one that reports what it has left out."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(_LEFT_OUT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: "WorkerController", error: object) -> None:
    """Every process has left out the same."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", [])


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    """Names the groups of tests that did not run."""
    skipped = [report.nodeid for report in terminalreporter.stats.get("skipped", [])]
    deselected = config.stash.get(_LEFT_OUT, [])
    terminalreporter.write_line(f"left out: {len(deselected)} deselected, {len(skipped)} skipped")
    for nodeid in sorted({nodeid.split("::")[0] for nodeid in [*deselected, *skipped]}):
        terminalreporter.write_line(f"  some or all of {nodeid}")
