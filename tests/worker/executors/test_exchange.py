"""The exchange between ranks under stress: processes, threads, lost ranks, pools; and under the sanitizers."""

import pytest

from tests.worker.executors.native_build import NATIVE, SANITIZED, SANITIZERS, compiled, stress

SCENARIOS = (
    "sums",
    "never_spinning",
    "threads_as_ranks",
    "with_pools",
    "wraps",
    "killed",
    "stopped",
    "left",
    "forked_child",
)


@pytest.fixture(scope="module", params=SANITIZED)
def program(request, tmp_path_factory):
    target = tmp_path_factory.mktemp(request.param) / "stress_exchange"
    return compiled(target, "stress_exchange.cpp", NATIVE / "pool.cpp", *SANITIZERS[request.param])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_ranks_read_what_all_have_written(program, scenario, ranks):
    stress(program, scenario, 0.1, ranks, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_for_long_and_with_too_many_ranks(program, scenario, ranks):
    stress(program, scenario, 2, ranks, 10 + ranks)
