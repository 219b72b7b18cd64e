"""Reports, budget and command of an audit."""

import asyncio
import json
import subprocess
import sys
from xml.etree import ElementTree

import httpx
import pytest

from holdfast.cluster.verify.audit import Audit
from holdfast.cluster.verify.compare import damage
from holdfast.cluster.verify.exchange import Ask
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.metrics_server import MetricsServer
from holdfast.cluster.verify.report import Report, page
from holdfast.cluster.verify.subject import Subject
from holdfast.cluster.verify.transport import Budget, Transport, base_url
from holdfast.worker.errors import ConfigurationError
from tests.cluster.verify.planted import Planted
from tests.cluster.verify.test_planted import audited, names

KEY = "sk-very-secret"
WITHOUT = """
import sys
REFUSED = {"torch", "ray", "transformers", "grpc", "numpy", "pydantic", "aiohttp", "starlette", "uvicorn", "tokenizers"}
class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"refused: {name}")
sys.meta_path.insert(0, Refusal())
from holdfast.cluster.commands import cli
sys.exit(cli.run(["verify", "http://127.0.0.1:9", "--json", sys.argv[1], "--html", sys.argv[2]]))
"""


def report_of(audit: Audit) -> Report:
    return Report.of(audit, server="http://server/v1", began_at="now", version="0", spent=(1, 2), secret=KEY)


def test_the_command_needs_nothing_of_what_serves_models(tmp_path):
    paths = [tmp_path / "report.json", tmp_path / "report.html"]
    ran = subprocess.run([sys.executable, "-c", WITHOUT, *paths], capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert "api.missing" in ran.stdout
    assert json.loads(paths[0].read_text())["counts"]["fault"] == 3
    assert "api.missing" in paths[1].read_text()


class Closing(Planted):
    """A server that closes the connections of its first requests before it answers."""

    def __init__(self, num_closed: int) -> None:
        super().__init__()
        self.num_closed = num_closed

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.num_closed:
            self.num_closed -= 1
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return await super().handle_async_request(request)


@pytest.mark.parametrize(("num_closed", "is_ok"), [(1, True), (2, False)])
def test_a_connection_that_closed_while_it_was_idle_is_no_error_of_the_server(num_closed, is_ok):
    async def run() -> bool:
        transport = Transport("http://server", "", Budget(), inner=Closing(num_closed))
        body = {"model": "base", "prompt": "x", "max_tokens": 1, "temperature": 0}
        (answer,) = await transport.send([Ask(path="completions", body=body)])
        await transport.close()
        return answer.is_ok

    assert asyncio.run(run()) == is_ok


def test_every_report_has_the_findings_and_none_has_the_key():
    audit = audited("ignores stop", ["stop"])
    audit.subject.found("extra", Kind.FAULT, f"the server said {KEY} and <b>\x00")
    audit._over_all()
    audit.results[-1] = type(audit.results[-1])(name="extra", findings=(audit.subject.findings[-1],))
    report = report_of(audit)
    texts = report.as_json(), report.as_junit(), page(report), report.as_metrics()
    assert all(KEY not in text for text in texts)
    assert all("stop.ignored" in text for text in texts[:3])
    assert json.loads(texts[0])["results"][1]["findings"][0]["evidence"]["request"]["stop"]
    cases = ElementTree.fromstring(texts[1]).findall("testcase")
    assert {case.get("name"): len(case) for case in cases if case.get("name") != "health"} == {
        "reach": 0,
        "stop": 4,
        "extra": 1,
    }
    assert "<b>\x00" not in texts[2]
    assert 'holdfast_verify_findings{server="http://server/v1",model="base",kind="fault"} 5' in texts[3]
    assert report.fails(Kind.FAULT)
    assert not report_of(audited(checks=["stop"])).fails(Kind.NOTE)


def test_a_budget_that_is_spent_skips_the_rest_and_says_so():
    audit = audited(checks=["purity", "finish"], budget=Budget(num_requests=30, rate=1e6))
    assert [bool(result.skipped) for result in audit.results[:3]] == [False, True, True]
    assert audited(checks=["finish"], budget=Budget(num_tokens=200, rate=1e6)).results[1].skipped
    assert audited(checks=["finish"], budget=Budget(seconds=0.1, rate=1e6)).results[1].skipped


def test_an_audit_that_is_cancelled_has_the_results_so_far():
    async def run():
        server = Planted("wrong finish")
        transport = Transport("http://server", "", Budget(rate=1e6), inner=server)
        audit = Audit(subject=Subject(model="", nonce="c"), checks=["finish", "stop"])
        with pytest.raises(asyncio.CancelledError):
            await audit.run(transport, lambda name: name == "stop" and asyncio.current_task().cancel())
        await transport.close()
        return audit

    audit = asyncio.run(run())
    assert [result.name for result in audit.results] == ["reach", "finish", "health"]
    assert "finish.wrong" in names(audit)


def test_perplexities_are_compared_with_a_reference():
    reference = audited(checks=["numbers"]).measured
    assert all(entry["nats_per_character"] > 0 for entry in reference.values())
    assert names(audited(checks=["numbers"], reference=reference)) == set()
    assert names(audited("other weights", ["numbers"], reference=reference)) == {"numbers.perplexity"}


def test_streams_during_a_command_are_judged():
    calls = []
    command = lambda: len(calls) < 3 and (calls.append(1) or True)  # noqa: E731
    assert names(audited(checks=["during"], command=command)) == set()
    assert len(calls) == 3
    calls.clear()
    assert "streams.repeated-text" in names(audited("repeats a chunk", ["during"], command=command))


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ("the quick fox jumps over", "lost"),
        ("the quick brown brown fox jumps over", "repeated"),
        ("the quick brown fox and the lazy dog jumps over", "mixed"),
        ("the quick brXwn fox jumps over", "changed"),
        ("the quick brown cat sleeps in the sun", ""),
        ("the quick and the lazy dog sleep", "mixed"),
        ("the quick brown fox jumps over", ""),
    ],
)
def test_damage_has_a_kind(found, kind):
    assert damage("the quick brown fox jumps over", found, ["here and the lazy dog sleep"]) == kind


@pytest.mark.parametrize("text", ["requests=0", "speed=4", "tokens=x", "requests=1.5", "rate=-1"])
def test_a_wrong_budget_is_refused(text):
    with pytest.raises(ConfigurationError, match="--budget"):
        Budget.parsed(text)


def test_budgets_and_addresses_are_read():
    assert Budget.parsed("40").num_requests == 40
    assert Budget.parsed("requests=7,tokens=9,rate=0.5") == Budget(num_requests=7, num_tokens=9, rate=0.5)
    assert base_url("localhost:8000") == "http://localhost:8000/v1"
    assert base_url("https://host/openai/") == "https://host/openai"
    with pytest.raises(ConfigurationError, match="--key-file"):
        base_url("http://user:word@host")
    assert Subject(model="m", nonce="n").apis == []


def test_a_watch_answers_with_the_gauges_of_its_last_audit():
    server = MetricsServer(0)
    try:
        address = f"http://127.0.0.1:{server.port}"
        assert httpx.get(f"{address}/metrics", trust_env=False).status_code == 503
        server.text = report_of(audited(checks=["stop"])).as_metrics()
        assert httpx.get(f"{address}/metrics", trust_env=False).text == server.text
        assert httpx.get(f"{address}/other", trust_env=False).status_code == 404
        with pytest.raises(ConfigurationError, match="--metrics-port"):
            MetricsServer(server.port)
    finally:
        server.close()
