"""The process of the front beside a cluster: what it is started with, and that it is started again."""

import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.free_port import pick_port
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.kept_process import FrontProcess, command_of, front_process, kept
from holdfast.cluster.serve.preflight import check_ports
from holdfast.worker.errors import ConfigurationError


def config(security: dict | None = None, **cluster: object) -> HoldfastConfig:
    settings = {"port": 5, "http_port": 10, "http_front_port": 0, "routers": 3} | cluster
    return HoldfastConfig.model_validate({"cluster": settings, "security": security or {}})


def test_it_is_before_every_router_that_may_run_here():
    command = command_of(config(host="0.0.0.0"))
    routers = ",".join(f"http://127.0.0.1:{port}" for port in (10, 11, 12))
    assert command[3:] == ["front", "--routers", routers, "--host", "0.0.0.0", "--port", "0"]
    secure = command_of(config({"tls_cert": "c.pem", "tls_key": "k.pem"}, host="10.0.0.1"))
    assert secure[5].startswith("https://10.0.0.1:10,")
    assert secure[-6::2] == ["--tls-cert", "--tls-key", "--routers-ca"]
    assert [Path(one).name for one in secure[-5::2]] == ["c.pem", "k.pem", "c.pem"]


def test_what_cannot_work_is_refused_before_anything_starts():
    files = {"tls_cert": "c.pem", "tls_key": "k.pem", "tls_client_ca": "ca.pem"}
    with pytest.raises(ConfigurationError, match="tls_client_ca"):
        check_ports(config(files))
    for wrong in ({"http_port": 0}, {"http_port": None}, {"port": 0}):
        with pytest.raises(ValueError, match="http_front_port"):
            config(**wrong)
    with pytest.raises(ValueError, match="holdfast front"):
        config(address="auto")


def test_a_front_that_is_killed_is_started_again_where_it_was():
    router = f"127.0.0.1:{pick_port()}"
    said: list[str] = []
    front = FrontProcess([*command_of(config())[:3], "front", "--routers", router, "--port", "0"])
    address, first = front.address, front.process
    with kept(front, said.append):
        first.kill()
        deadline_s = time.monotonic() + 60
        while front.process is first:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        with urllib.request.urlopen(f"http://{address}/front/metrics", timeout=10) as answer:
            assert b"holdfast_front_open 0" in answer.read()
    front.end()
    (line,) = said
    assert line.startswith("the front has ended (signal 9 after ")
    assert line.endswith(" s; clients are answered again then")
    assert front.process.poll() is not None


def test_one_that_cannot_be_started_says_why():
    with pytest.raises(ConfigurationError, match="cannot be started"):
        FrontProcess([*command_of(config())[:3], "front", "--routers", "ftp://x", "--port", "0"])
    with front_process(config(http_front_port=None), print) as address:
        assert address == ""
