import pytest

from tests.chaos.tally import Tally

_TALLY = pytest.StashKey[Tally]()


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """What the faults of this run have done; shown at its end."""
    return pytestconfig.stash.setdefault(_TALLY, Tally())


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    for line in config.stash.get(_TALLY, Tally()).lines():
        terminalreporter.write_line(line)
