"""A replica over real processes: the death of a rank, of the leader, and an orderly end."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.replica.rank import LocalLauncher, LocalRanks
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate
from tests.parity.families import save_tiny_model

TIMEOUT_S = 60


class Launcher(LocalLauncher):
    """Keeps hold of what it launched."""

    def launch(self, config: WorkerConfig, rendezvous: Rendezvous) -> LocalRanks:
        self.ranks = super().launch(config, rendezvous)
        return self.ranks


class Listener:
    def __init__(self) -> None:
        self.started, self.failed = threading.Event(), threading.Event()
        self.error: HoldfastError | None = None

    def on_update(self, update: StepUpdate) -> None:
        if update.deltas:
            self.started.set()

    def on_failure(self, error: HoldfastError) -> None:
        self.error = error
        self.failed.set()


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> WorkerConfig:
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=100_000)
    return WorkerConfig(
        model=ModelConfig(model=str(folder), device="cpu"),
        parallel=ParallelConfig(tensor_parallel_size=2, num_threads=1),
        cache=CacheConfig(block_size=16, num_blocks=6400),
    )


def endless_request() -> EngineRequest:
    params = SamplingParams(max_tokens=90_000, seed=0, ignore_eos=True)
    return EngineRequest(request_id="endless", prompt_token_ids=(5, 6, 7), sampling_params=params)


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["busy", "idle"])
def test_a_killed_rank_fails_the_replica_and_every_caller_hears(config, busy):
    launcher, listener, heard = Launcher(), Listener(), threading.Event()
    replica = Replica.start(config, launcher)
    replica.on_failure(lambda error: heard.set())
    replica.engine.attach(listener)
    if busy:
        replica.engine.submit(endless_request(), listener)
        assert listener.started.wait(TIMEOUT_S)
    os.kill(launcher.ranks.pids[0], signal.SIGKILL)
    assert listener.failed.wait(TIMEOUT_S)
    assert heard.wait(TIMEOUT_S)
    assert isinstance(listener.error, ReplicaError)
    with pytest.raises(ReplicaError):
        replica.engine.submit(endless_request(), listener)
    replica.stop()


@pytest.mark.slow  # for a replica of one rank, the sweep of faults does it every time
def test_a_rank_that_the_system_gives_no_more_memory_fails_the_replica(config):
    """A real limit on a real process: the rank has what it has, and a long prompt takes more."""
    launcher, listener = Launcher(), Listener()
    replica = Replica.start(config, launcher)
    replica.engine.attach(listener)
    rank = psutil.Process(launcher.ranks.pids[0])
    limit = rank.memory_info().vms
    rank.rlimit(psutil.RLIMIT_AS, (limit, limit))
    params = SamplingParams(max_tokens=1000, seed=0, ignore_eos=True)
    replica.engine.submit(
        EngineRequest(request_id="long", prompt_token_ids=tuple(range(5, 100)) * 300, sampling_params=params), listener
    )
    assert listener.failed.wait(TIMEOUT_S)
    assert isinstance(listener.error, ReplicaError)
    assert psutil.wait_procs([rank], timeout=TIMEOUT_S)[1] == []
    replica.stop()


def test_a_rank_that_dies_while_the_group_meets_is_an_error_not_a_wait(config):
    class Deadly(LocalLauncher):
        def launch(self, config: WorkerConfig, rendezvous: Rendezvous) -> LocalRanks:
            ranks = super().launch(config, rendezvous)
            os.kill(ranks.pids[0], signal.SIGKILL)
            return ranks

    with pytest.raises(ReplicaError, match="rank 1 ended with code -9"):
        Replica.start(config, Deadly())


@pytest.mark.parametrize("num_starts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopping_leaves_no_rank_and_lets_another_replica_start(config, num_starts):
    for _ in range(num_starts):  # after those of the tests before
        launcher = Launcher()
        replica = Replica.start(config, launcher)
        replica.stop()
        assert not any(psutil.pid_exists(pid) for pid in launcher.ranks.pids)


LEADER = """
import sys
from holdfast.worker.config import WorkerConfig
from holdfast.worker.replica.rank import LocalLauncher
from holdfast.worker.replica.replica import Replica

class Launcher(LocalLauncher):
    def launch(self, config, rendezvous):
        ranks = super().launch(config, rendezvous)
        print(*ranks.pids, flush=True)
        return ranks

replica = Replica.start(WorkerConfig.model_validate_json(sys.argv[1]), Launcher())
if sys.argv[2:] == ["guarded"]:
    replica.guard()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["running", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_killed_leader_leaves_no_rank_behind(config, tmp_path, state):
    """A rank sees to that itself; for one that cannot, the leader's hang supervisor does."""
    script = tmp_path / "leader.py"
    script.write_text(LEADER)
    root = Path(__file__).parents[3]
    leader = subprocess.Popen(
        [sys.executable, str(script), config.model_dump_json(), *(["guarded"] if state == "stopped" else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    ranks = [psutil.Process(int(pid)) for pid in leader.stdout.readline().split()]
    assert leader.stdout.readline() == "up\n"
    if state == "stopped":
        ranks[0].suspend()
    leader.kill()
    leader.wait(TIMEOUT_S)
    _, alive = psutil.wait_procs(ranks, timeout=TIMEOUT_S)
    assert not alive
