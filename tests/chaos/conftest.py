import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import loops
from tests.chaos.tally import Tally

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

_TALLY = pytest.StashKey[Tally]()
_TOLD = pytest.StashKey[list[str]]()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with loops.runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """What the faults of this run have done; shown at its end."""
    return pytestconfig.stash.setdefault(_TALLY, Tally())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of `pytest -n` hands its table to the one that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and _TALLY in session.config.stash:
        output["tally"] = list(session.config.stash[_TALLY].lines())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: "WorkerController", error: object) -> None:
    node.config.stash.setdefault(_TOLD, []).extend(getattr(node, "workeroutput", {}).get("tally", []))


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    for line in [*config.stash.get(_TALLY, Tally()).lines(), *config.stash.get(_TOLD, [])]:
        terminalreporter.write_line(line)
