"""What the code for every device does on a GPU, shown by fakes: nothing here needs one."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from holdfast.worker.config import WorkerConfig
from holdfast.worker.engine.model_runner import ModelRunner
from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import DistributedGroup
from holdfast.worker.replica.rank import with_device
from holdfast.worker.replica.replica import Replica

CUDA = torch.device("cuda", 3)


def decode_batch(count, context):
    blocks = -(-context // 64)
    return StepBatch(
        step_id=0,
        token_ids=np.zeros(count, dtype=np.int64),
        first_positions=np.full(count, context - 1),
        num_tokens=np.ones(count, dtype=np.int64),
        num_draws=np.ones(count, dtype=np.int64),
        block_ids=np.arange(count * blocks),
        num_blocks=np.full(count, blocks),
        block_copies=np.zeros((3, 0), dtype=np.int64),
        logits_rows=np.arange(count),
    )


class Lost(Exception):
    """Ends a start where a test has seen enough."""


class Launcher:
    meeting_host = "127.0.0.1"

    def launch(self, config, rendezvous):
        self.device = config.model.device
        raise Lost


def test_ranks_are_told_the_device_that_the_leader_has_found(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2}')
    config, launcher = WorkerConfig(model={"model": str(tmp_path)}, parallel={"tensor_parallel_size": 2}), Launcher()
    assert config.model.device == "auto"
    assert with_device(config, CUDA).model.device == "cuda"
    with pytest.raises(Lost):
        Replica.start(config, launcher)
    assert launcher.device == ("cuda" if torch.cuda.is_available() else "cpu")


class Ran:
    class progress:
        pass

    def run(self, batch, *, with_logits):
        pass


def test_each_thread_that_runs_steps_takes_the_device(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append((device, threading.get_ident())))
    loaded = type("Loaded", (), {"info": None, "backend": Ran(), "draft": None, "pooler": None})()
    runner, batch = ModelRunner(loaded, None, None, CUDA), decode_batch(1, 64)
    runner.execute(batch)
    thread = threading.Thread(target=lambda: [runner.execute(batch) for _ in range(2)])
    thread.start()
    thread.join()
    assert [device for device, _ in taken] == [CUDA, CUDA]
    assert taken[0][1] != taken[1][1]


def nccl_group(size):
    group = DistributedGroup.__new__(DistributedGroup)
    group.size, group._has_nccl = size, True
    return group


def test_nccl_gathers_into_one_tensor_and_sockets_take_what_lies_in_main_memory(monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda out, x: calls.append(tuple(out.shape)))
    group = nccl_group(2)
    group._sockets = SimpleNamespace(exchange=lambda x: calls.append("sockets") or [x, x])
    assert [part.shape for part in group._gather(torch.empty(5, 7, device="meta"))] == [(5, 7)] * 2
    group.all_gather(torch.empty(3))
    assert calls == [(2, 5, 7), "sockets"]


@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_gathers_to_the_leader_alone_side_by_side(monkeypatch, rank):
    calls = []

    def gather(x, parts, dst):
        calls.append((x.is_contiguous(), None if parts is None else [part.shape for part in parts], dst))

    monkeypatch.setattr(dist, "gather", gather)
    group = nccl_group(2)
    group.rank = rank
    found = group.gather(torch.empty(7, 5, device="meta").T)
    if rank == 0:
        assert found.shape == (5, 14)
        assert calls == [(True, [(5, 7)] * 2, 0)]
    else:
        assert found is None
        assert calls == [(True, None, 0)]


def test_a_replica_that_has_lost_a_rank_ends_what_waits_for_it(monkeypatch):
    """Nobody waits for NCCL's abort itself, which here never comes back."""
    began, released = threading.Event(), threading.Event()

    def abort():
        began.set()
        released.wait(30)

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    replica = Replica.__new__(Replica)
    replica._lock, replica._stopping, replica._failure = threading.Lock(), False, None
    replica._callbacks, replica._ranks, replica._group = [], None, nccl_group(2)
    monkeypatch.setattr(replica, "_stop_watching", lambda: None)
    replica._fail(ReplicaError("rank 1 ended"))
    assert began.wait(30)
    assert replica._group.is_aborted, "waits for the device look at this"
    released.set()
