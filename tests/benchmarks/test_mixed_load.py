"""Case g of the benchmark against peers: which load every server gets, and what the tables say of it."""

import pytest

from benchmarks.peers import mixed_load
from benchmarks.peers.mixed_load import Load, capacity_sheet, latency_sheet, measured, opened
from benchmarks.peers.peers import PEERS
from benchmarks.peers.server import ServerError
from holdfast.cluster.bench.report import Distribution, Run
from tests.benchmarks.test_peers import fake, folders

folders = folders


class Rates:
    """In place of `Bench`: one server takes eight requests a second, the other two. Notes what each was asked."""

    def __init__(self):
        self.asked = []

    def capacity(self, name):
        return {"ours": 8.0, "theirs": 2.0}[name]

    def at(self, name, rate):
        self.asked.append((name, rate))
        return Load(run(ttft_s=rate if name == "ours" else 10 * rate), others=0.25)

    def best_rate(self, name, start):
        assert start == 1.0
        return 6.5 if name == "ours" else None


def run(ttft_s):
    latency = Distribution.model_construct(p50=ttft_s, p99=2 * ttft_s)
    return Run.model_construct(failed=3, ttft_s=latency, tpot_s=None)


def test_all_servers_get_the_same_rates_which_the_slower_one_sets(monkeypatch):
    rates = Rates()
    found = measured(rates, ["ours", "theirs"])
    assert rates.asked == [(name, rate) for rate in (1.0, 1.6, 2.0) for name in ("ours", "theirs")]
    rows = latency_sheet(found).rows
    assert [row[:2] for row in rows[:2]] == [["0.5: 1.00/s", "ours"], ["0.5: 1.00/s", "theirs"]]
    assert rows[1][2:] == ["10000", "20000", "", "", "3", "25%"]
    assert capacity_sheet(found).rows == [["ours", "8.00", "6.50"], ["theirs", "2.00", "none"]]


def test_a_driver_tells_its_apis_and_one_that_is_not_there_is_an_error(folders):
    apis = {"http": "http://127.0.0.1:1", "grpc": "127.0.0.1:2"}
    with opened([fake("ours", apis=apis)], "X", folders) as servers:
        assert servers["ours"].apis == apis
    with pytest.raises(ServerError, match="not installed"), opened([PEERS["vllm-http"]], "X", folders):
        pass
    assert mixed_load.OURS in PEERS
