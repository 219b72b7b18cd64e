"""What every test shares: few threads, no hub, an end to every hang, and a summary of what was left out."""

import faulthandler
import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is loaded; tests that need a GPU set 0
os.environ.setdefault("SSL_CERT_DIR", "/etc/ssl/certs")
os.environ.pop("SSL_CERT_FILE", None)  # httpx would read all of it for each client; of a folder it reads what it needs
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from typing import TYPE_CHECKING, Final

import pytest

from tests import examples

if TYPE_CHECKING:
    from pytest_timeout import Settings
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

sys.dont_write_bytecode = False  # dozens of processes import the same files, which are compiled once

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


STARTS_CLUSTERS = ("tests/integration/", "tests/chaos/", "tests/k8s/test_local_cluster.py", "tests/k8s/test_hosts.py")
"""What `pytest -n` runs in one process, one after the other: these tests wait most of the time, and one machine
has room for one Ray. Those that start Ray come first.
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling":
    """A file is the unit, so that its fixtures are made once. All that starts clusters is one."""
    from xdist.scheduler import LoadScopeScheduling

    class LoadFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if nodeid.startswith(STARTS_CLUSTERS) else nodeid.split("::")[0]

        def _reschedule(self, node: "WorkerController") -> None:
            """A process begins a test once it knows the next, or that there is none: a replaced one may get one."""
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

        def remove_node(self, node: "WorkerController") -> str | None:
            """A process that was lost is replaced. The test that ended it has failed, and is not run again."""
            units = list(self.assigned_work[node].values())
            lost = super().remove_node(node)
            for unit in units:
                if lost in unit:
                    unit[lost] = True
            return lost

    return LoadFiles(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests need a GPU; that they were left out is said at the end, never in silence."""
    examples.leave_to_long_runs(items)
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


def pytest_collection_finish() -> None:
    """Modules and collected tests, a million objects, stay to the end: no search for garbage looks at them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    beside = Path(__file__).parent.parent.parent / "shared" / "crds"
    parser.addoption("--crds", default=beside, help="folder with the CRDs that manifests in k8s/ are checked against")


_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected
    config.stash[_STDERR] = os.dup(2)  # nothing is captured just now
    examples.load_profile(is_long="not slow" not in config.option.markexpr)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """A line for each failure when it happens: a run that is cut off has named what failed until then."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if not report.failed or terminal is None:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message.partition("\n")[0] if crash is not None else "see below"
        terminal.write_line(f"\nfailed: {report.nodeid} ({report.when}): {reason[:200]}")


def pytest_timeout_set_timer(item: pytest.Item, settings: "Settings") -> bool:
    """A test that hangs ends its process, with all stacks: uvloop swallows what the handler of a signal raises, and a
    call may hold the interpreter. `pytest -n` names the test, replaces the process and goes on.
    """
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[_STDERR])
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    faulthandler.cancel_dump_traceback_later()
    return True


WHOLE_EVERY: Final = 8
"""Files between two searches for garbage among all objects, where a replica has thawed them: these are a million."""
_FILES: Final = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """What a file says of torch's threads is forgotten after it: which rows agree depends on their number."""
    gc.collect(2 if next(_FILES) % WHOLE_EVERY == 0 else 1)
    gc.freeze()  # also what a file before has thawed
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


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
