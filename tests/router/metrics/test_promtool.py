"""Prometheus' own tool takes the alert rules, and what routers and replicas expose."""

import shutil
import subprocess

import pytest

from holdfast.router.metrics.catalogue import METRICS
from holdfast.router.metrics.exposition import Sample, exposed
from holdfast.worker.step_update import Histogram
from tests.router.metrics.test_catalogue import MONITORING

pytestmark = pytest.mark.slow
PROMTOOL = shutil.which("promtool")


def promtool(*arguments: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    if PROMTOOL is None:
        pytest.fail("promtool is missing: it checks the alert rules and the metrics; `apt-get install prometheus`")
    return subprocess.run([PROMTOOL, *arguments], input=given, capture_output=True, timeout=60)


def test_prometheus_takes_the_alert_rules():
    message = promtool("check", "rules", str(MONITORING / "alerts.yml"))
    assert message.returncode == 0, message.stderr.decode()
    assert b"SUCCESS" in message.stdout


def test_a_rule_that_is_wrong_is_refused(tmp_path):
    wrong = tmp_path / "alerts.yml"
    wrong.write_text((MONITORING / "alerts.yml").read_text().replace("histogram_quantile(0.95,", "quantile_of(0.95,"))
    assert promtool("check", "rules", str(wrong)).returncode != 0


def test_prometheus_takes_every_metric_without_a_complaint():
    filled = Histogram()
    filled.note(0.2)
    samples = [
        Sample(name, tuple(f'{label} "1"\n\\' for label in one.labels), filled if one.kind == "histogram" else 1)
        for name, one in METRICS.items()
    ]
    text, _ = exposed(samples)
    message = promtool("check", "metrics", given=text)
    complaints = [line for line in message.stderr.decode().splitlines() if not line.startswith("vllm:")]
    assert not complaints, complaints  # a name with a colon is what a gateway asks for
