"""The thread pool under stress: late, stopped and too many threads, fork, several pools; and under the sanitizers."""

import ctypes
import errno

import pytest

from tests.worker.executors.native_build import NATIVE, SANITIZED, SANITIZERS, compiled, stress

POOL = NATIVE / "pool.cpp"
SCENARIOS = (
    "random_phases",
    "never_spinning",
    "limits",
    "stopped_threads",
    "late_thread",
    "two_pools",
    "nested_pools",
    "fork_keeps_out",
    "destroyed_at_any_time",
    "idle_sleeps",
    "on_cores",
    "keeps_off_callers_core",
)


@pytest.fixture(scope="module", params=SANITIZED)
def program(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return compiled(folder / "stress_pool", "stress_pool.cpp", POOL, *SANITIZERS[request.param])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_task_runs_once_and_in_its_phase(program, scenario):
    stress(program, scenario, 0.1, 3, 1)


def test_two_threads_keep_apart(program):
    stress(program, "keeps_off_callers_core", 0.1, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 4, 16])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_for_long_and_with_too_many_threads(program, scenario, threads):
    stress(program, scenario, 3, threads, threads)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = compiled(tmp_path_factory.mktemp("library") / "pool.so", POOL, "-O2", "-fPIC", "-shared")
    library = ctypes.CDLL(str(path), use_errno=True)
    library.native_pool_create.restype = ctypes.c_void_p
    library.native_pool_create.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    for name in ("destroy", "threads", "drain"):
        getattr(library, f"native_pool_{name}").argtypes = [ctypes.c_void_p]
    return library


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pool_is_made_and_destroyed(library, threads):
    pool = library.native_pool_create(threads, -1, None)
    assert library.native_pool_threads(pool) == threads
    assert library.native_pool_drain(pool) == 0
    library.native_pool_destroy(pool)


@pytest.mark.parametrize(("threads", "cores"), [(0, None), (-1, None), (1025, None), (2, (0, -1)), (2, (0, 1024))])
def test_a_pool_out_of_range_is_refused(library, threads, cores):
    ctypes.set_errno(0)
    assert not library.native_pool_create(threads, -1, (ctypes.c_int * len(cores))(*cores) if cores else None)
    assert ctypes.get_errno() == errno.EINVAL
