"""A replica that computes wrongly is found by a question that it has answered before, and a healthy one never is."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import c_uint32
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
import torch

from holdfast.worker.config import (
    CacheConfig,
    HealthConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    WorkerConfig,
)
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.model_runner import ModelRunner, follow
from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu import executor as cpu_executor
from holdfast.worker.executors.cpu.tile_memory import Arena
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.hf_backend import HfBackend
from holdfast.worker.models.linear import Linear
from holdfast.worker.models.native_backend import NUMERICS, UNIT_NUMERICS
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.worker.executors.cpu.native import ALL, library_or_skip
from tests.worker.models.formats.gguf_files import write_model
from tests.worker.replica.test_known_answer_check import TIMEOUT_S, Listener

SELDOM = HealthConfig(self_check_every_s=3600)
"""The test asks, and nobody else."""


VARIANTS: dict[str, dict[str, Any]] = {
    "strangers": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "preemption": {"num_tokens": 240},
    "larger blocks": {"cache": {"block_size": 32}},
    "ngram": {"speculation": {"speculative": "ngram"}},
    "suffix": {"speculation": {"speculative": "suffix"}},
}
FEW = ("strangers", "preemption")
"""Of two ranks, and on the HF backend: what a variant does to steps is the same there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["native", "hf"])
def executor(request) -> str:
    return request.param


def config_of(
    folder, executor: str, size: int = 1, health: HealthConfig = SELDOM, num_tokens: int = 1600, **variant: Any
) -> WorkerConfig:
    cache = {"block_size": 16, **variant.get("cache", {})}
    scheduler = {"max_num_batched_tokens": 256, "max_num_seqs": 12, "aging_s": 0.05, **variant.get("scheduler", {})}
    return WorkerConfig(
        model=ModelConfig(model=str(folder), device="cpu", executor=executor),
        parallel=ParallelConfig(tensor_parallel_size=size, num_threads=1),
        cache=CacheConfig(num_blocks=num_tokens // cache["block_size"], **cache),
        scheduler=SchedulerConfig(**scheduler),
        speculation=SpeculationConfig(**variant.get("speculation", {})),
        health=health,
    )


def strangers() -> Iterator[EngineRequest]:
    rng = random.Random(3)
    for number in count():
        prompt = [rng.randrange(3, 100) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=number, max_tokens=60, ignore_eos=True)
        yield EngineRequest(request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling_params=params)


class Crowd(Listener):
    """Thirty strangers at any time: whoever ends is replaced."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self.requests = engine, strangers()
        engine.attach(self)
        for request in islice(self.requests, 30):
            engine.submit(request, self)

    def on_update(self, update: StepUpdate) -> None:
        for delta in update.deltas:
            if delta.finish_reason is FinishReason.LENGTH:
                with suppress(ReplicaError):  # it is being stopped
                    self.engine.submit(next(self.requests), self)


def ask_under_load(replica: Replica, num_times: int) -> None:
    """Asks so many times while others run, and waits for the answers. They are still running then."""
    known_answer_check = replica._known_answer_check
    Crowd(replica.engine)
    for number in range(num_times):
        assert known_answer_check.ask()
        while known_answer_check.num_right <= number and replica.engine.failure is None:
            replica.engine.stats(TIMEOUT_S)
    assert replica.engine.failure is None
    assert replica.engine.load.num_running + replica.engine.load.num_waiting > 0


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"])
def test_a_healthy_replica_gives_the_same_bits_in_any_company(folder, executor, size):
    """And so does every other one, whatever its settings: the digests are equal."""
    digests = set()
    for name in VARIANTS if (executor, size) == ("native", 1) else FEW:
        replica = Replica.start(config_of(folder, executor, size, **VARIANTS[name]))
        ask_under_load(replica, 2 if size == 1 else 1)
        digests.add(replica.info.answers_digest)
        assert name != "preemption" or replica.engine.stats().num_preemptions > 0
        replica.stop()
    assert len(digests) == 1


UNITS_OF_ONE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
"""Every slice of a sum has whole units of a quantized weight."""


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory):
    """Linears in units of four forms, some of them beside each other."""
    others = {"attn_v": "Q8_0", "ffn_gate": "Q4_0", "ffn_down": "Q5_1"}
    return write_model("llama", tmp_path_factory.mktemp("mixed"), "Q4_1", others=others, **UNITS_OF_ONE).file


@pytest.fixture(scope="module")
def digest_in_int8(mixed_file):
    replica = Replica.start(config_of(mixed_file, "native"))
    ask_under_load(replica, 1)
    replica.stop()
    return replica.info.answers_digest


@pytest.mark.parametrize("name", ALL)
def test_a_replica_in_int8_has_the_same_bits_with_every_class_of_instructions(
    mixed_file, digest_in_int8, name, monkeypatch
):
    library = library_or_skip(name)
    monkeypatch.setattr(cpu_executor, "load_library", lambda _=None: library)
    replica = Replica.start(config_of(mixed_file, "native"))
    ask_under_load(replica, 2)
    backend = replica.engine._runner._runner.backend
    assert (backend.numerics, backend.executor.instruction_class) == (f"{NUMERICS}+{UNIT_NUMERICS}", name)
    assert replica.info.answers_digest == digest_in_int8
    replica.stop()


@pytest.mark.parametrize("variant", ["preemption", "ngram", pytest.param("chunks", marks=pytest.mark.slow)])
def test_a_replica_in_int8_gives_the_same_bits_in_any_company(mixed_file, digest_in_int8, variant):
    replica = Replica.start(config_of(mixed_file, "native", **VARIANTS[variant]))
    ask_under_load(replica, 2)
    assert replica.info.answers_digest == digest_in_int8
    replica.stop()


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    tensor.detach().view(-1)[index : index + 1].view(torch.int32).bitwise_xor_(1 << bit)


def flip_at(address: int, index: int, bit: int) -> None:
    """Of float32 numbers of the native executor's."""
    (c_uint32 * 1).from_address(address + 4 * index)[0] ^= 1 << bit


def flip_a_norm(runner: ModelRunner) -> None:
    backend = runner.backend
    if isinstance(backend, HfBackend):
        flip(backend.model.module.model.layers[1].input_layernorm.weight, 5, 12)
    else:
        flip_at(backend.executor.packed.layers[1].attention_norm.weight, 5, 12)


def flip_the_last_norm(runner: ModelRunner) -> None:
    backend = runner.backend
    if isinstance(backend, HfBackend):
        flip(backend.model.module.model.norm.weight, 0, 20)
    else:
        flip_at(backend.executor.packed.model.norm.weight, 0, 20)


def flip_a_packed_weight(runner: ModelRunner) -> None:
    up = runner.backend.executor.packed.layers[0].mlp.up
    flip_at(up.tiles + max(0, up.panel_bytes - 64), 3, 21)  # a mantissa, also where weights are compact


def spoil_a_kernel(runner: ModelRunner) -> None:
    """One of the output features comes out a little off, in one row of a hundred."""
    linear = next(module for module in runner.backend.model.module.modules() if isinstance(module, Linear))
    kernel = linear._kernel

    def spoiled(rows: torch.Tensor) -> torch.Tensor:
        return kernel(rows) * torch.ones(rows.shape[-2], 1).index_fill(0, torch.tensor([rows.shape[-2] // 2]), 1.0001)

    linear._kernel = spoiled


def assert_found(replica: Replica, spoil: Callable[[], None]) -> None:
    """It answers rightly, is spoiled, and is lost at the next question."""
    listener, heard = Listener(), threading.Event()
    replica.on_failure(lambda error: heard.set())
    ask_under_load(replica, 1)
    replica.engine.attach(listener)
    spoil()
    replica._known_answer_check.ask()
    assert listener.failed.wait(TIMEOUT_S)
    assert heard.wait(TIMEOUT_S)
    assert "answered its self-check wrongly: " in str(listener.error)
    assert replica.engine.failure is listener.error
    assert replica._known_answer_check._loop._stopped.is_set()
    replica.stop()


@pytest.mark.parametrize(
    ("executor", "spoil"),
    [
        ("native", flip_a_norm),
        ("native", flip_the_last_norm),
        ("native", flip_a_packed_weight),
        ("hf", flip_a_norm),
        ("hf", spoil_a_kernel),
    ],
)
def test_a_replica_whose_weights_or_kernels_go_wrong_is_lost_at_the_next_question(folder, executor, spoil, monkeypatch):
    monkeypatch.setattr(cpu_executor, "arena_for", lambda layout, name: Arena())  # shared weights are sealed
    config, group = config_of(folder, executor), SingleRank()
    runner = ModelRunner.load(config, group, device=torch.device("cpu"))
    assert_found(Replica.around(config, runner, group), lambda: spoil(runner))


def test_a_flipped_bit_on_a_rank_that_is_not_the_leader_is_found_as_well(folder, executor):
    config = config_of(folder, executor, size=2)
    runners: dict[int, ModelRunner] = {}

    def run(group) -> None:
        runner = runners[group.rank] = ModelRunner.load(config, group, device=torch.device("cpu"))
        if group.rank > 0:
            with suppress(threading.BrokenBarrierError):  # the leader may be gone before its last order was read
                follow(runner, group)
            return None
        return assert_found(Replica.around(config, runner, group), lambda: flip_a_norm(runners[1]))

    run_ranks(2, run)


def test_other_weights_have_another_digest(folder, tmp_path):
    digests = set()
    for path in (folder, save_tiny_model("llama", tmp_path, seed=1)):
        replica = Replica.start(config_of(path, "native"))
        digests.add(replica.info.answers_digest)
        replica.stop()
    assert len(digests) == 2


@pytest.mark.parametrize("why", ["turned off", "rows are not invariant"])
def test_where_there_is_nothing_to_compare_nothing_is_asked(folder, why):
    health = HealthConfig(self_check_every_s=0) if why == "turned off" else SELDOM
    config, group = config_of(folder, "native", health=health), SingleRank()
    runner = ModelRunner.load(config, group, device=torch.device("cpu"))
    if why != "turned off":
        runner.info = replace(runner.info, row_invariant=False)
    replica = Replica.around(config, runner, group)
    assert replica.info.answers_digest == b""
    assert replica.engine.stats().num_requests == 0
    replica.stop()
