"""pytest's plugin for others' suites: the server that runs in the place of theirs, and a report of each test.

Of vLLM's tests those are run that ask a server: the others are about its own classes.
"""

import inspect
import json
from pathlib import Path

import pytest

from scripts.vllm_suite.stand_ins import install


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--served-url")
    parser.addoption("--served-tokenizer")
    parser.addoption("--outcomes", help="a file for one JSON line of each test")
    parser.addoption("--stand-ins", help="vLLM's source; unset: tests import what they want")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Conftests import the stand-ins, too."""
    given = early_config.known_args_namespace
    if given.stand_ins:
        install(Path(given.stand_ins), given.served_url, given.served_tokenizer)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if not config.getoption("--stand-ins"):
        return
    asked = [item for item in items if asks_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asked])
    items[:] = asked


def asks_a_server(item: pytest.Function) -> bool:
    return "server" in item.fixturenames or "RemoteOpenAIServer(" in inspect.getsource(item.function)


class Outcomes:
    """Writes what came of each test, and of each file that cannot be collected."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, test: str, outcome: str, why: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "why": why[-300:]}) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", _reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, _reason(report))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).strip()
    return (str(report.longrepr or "").strip().splitlines() or [""])[-1]


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if path := session.config.getoption("--outcomes"):
        session.config.pluginmanager.register(Outcomes(Path(path)))
