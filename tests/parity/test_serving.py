"""The whole worker against Hugging Face: arrival in random order, memory so small that sequences are preempted, real
ranks over sockets, and the same tokens all the same."""

import random
import threading
from dataclasses import replace

import pytest

from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.errors import HoldfastError
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate
from tests.parity.harness import hugging_face, likeliest_tokens

NUM_NEW = 32
TIMEOUT_S = 120
BLOCK_SIZE = 16


class Collector:
    """A listener that gathers tokens and knows when `num_requests` have ended."""

    def __init__(self, num_requests: int) -> None:
        self.tokens: dict[str, list[int]] = {}
        self._left = num_requests
        self._error: HoldfastError | None = None
        self._done = threading.Event()

    def on_update(self, update: StepUpdate) -> None:
        assert not update.rejections
        for delta in update.deltas:
            self.tokens.setdefault(delta.attempt, []).extend(delta.token_ids)
            self._left -= delta.finish_reason is not None
        if not self._left:
            self._done.set()

    def on_failure(self, error: HoldfastError) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> dict[str, list[int]]:
        assert self._done.wait(TIMEOUT_S), "the requests did not end in time"
        if self._error:
            raise self._error
        return self.tokens


def run(replica: Replica, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Submits all at once, in the order given; the tokens of each by its id."""
    collector = Collector(len(requests))
    replica.engine.attach(collector)
    for request in requests:
        replica.engine.submit(request, collector)
    tokens = collector.wait()
    replica.engine.detach(collector)
    return tokens


def make_requests(prompts: list[list[int]], **params) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(prompt),
            sampling_params=SamplingParams(**{"max_tokens": NUM_NEW, "seed": 1000 + i, "ignore_eos": True, **params}),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def many_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 126) for _ in range(rng.randint(1, 60))] for _ in range(33)]


MODELS = [
    pytest.param(
        (size, executor),
        id=f"tp{size}-{executor}",
        marks=[] if (size, executor) in ((1, "hf"), (2, "native")) else pytest.mark.slow,
    )
    for size in (1, 2)
    for executor in ("native", "hf")
]
"""Ranks, and what runs the model: each of both every time."""


@pytest.fixture(scope="module", params=MODELS)
def replica(request, tiny_model):
    """A llama whose cache holds about four of the longest sequences, for 16 that would run at once."""
    size, executor = request.param
    config = WorkerConfig(
        model=ModelConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu", executor=executor),
        parallel=ParallelConfig(tensor_parallel_size=size, num_threads=1),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=400 // BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=16),
    )
    replica = Replica.start(config)
    yield replica
    replica.stop()


def test_greedy_tokens_are_those_of_generate(replica, many_prompts, tiny_model):
    requests = make_requests(many_prompts, temperature=0.0)
    random.Random(1).shuffle(requests)
    before = replica.engine.stats().num_preemptions
    tokens = run(replica, requests)
    assert replica.engine.stats().num_preemptions > before, "the memory was meant to be too small"
    assert {len(some) for some in tokens.values()} == {NUM_NEW}
    model = hugging_face(tiny_model("llama"))
    for number, prompt in enumerate(many_prompts):
        assert tokens[f"r{number}"] == likeliest_tokens(model, prompt, tokens[f"r{number}"])


def test_seeded_tokens_are_the_same_alone_and_in_a_batch_of_33(replica, many_prompts):
    requests = make_requests(many_prompts, temperature=0.8, top_k=50, top_p=0.95)
    together = run(replica, requests)
    for request in requests[::4]:
        assert run(replica, [request]) == {request.request_id: together[request.request_id]}


def test_a_continued_request_goes_on_with_the_tokens_it_would_have_had(replica, many_prompts):
    requests = make_requests(many_prompts[:8], temperature=0.8)
    whole = run(replica, requests)
    for number, request in enumerate(requests):
        cut = 1 + 4 * number
        output = tuple(whole[request.request_id][:cut])
        rest = EngineRequest(
            request_id="rest",
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            output_token_ids=output,
        )
        assert run(replica, [rest])["rest"] == whole[request.request_id][cut:]


def test_nothing_is_left_behind(replica):
    stats = replica.engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    assert stats.num_running == stats.num_waiting == 0


# --- Prefix caching ---


@pytest.fixture(scope="module")
def caching(tiny_model, executor):
    """Starts a llama of one rank, with or without a prefix cache. One of 240 tokens evicts and preempts."""
    replicas = []

    def start(enabled: bool, num_tokens: int = 1600) -> Replica:
        config = WorkerConfig(
            model=ModelConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu", executor=executor),
            parallel=ParallelConfig(num_threads=1),
            cache=CacheConfig(
                block_size=BLOCK_SIZE, num_blocks=num_tokens // BLOCK_SIZE, enable_prefix_caching=enabled
            ),
            scheduler=SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=16),
        )
        replicas.append(Replica.start(config))
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.stop()


@pytest.fixture(scope="module")
def alone_without_cache(caching, many_prompts):
    """Requests, greedy and seeded, most with a prefix in common, and the tokens of each run alone, computed in full."""
    document = many_prompts[0] + many_prompts[1] + many_prompts[2]
    prompts = [document[: 7 * i] + prompt[:6] for i, prompt in enumerate(many_prompts[3:9])] + many_prompts[9:12]
    requests = make_requests(prompts[::2], temperature=0.0)
    requests += [replace(request, request_id=f"s{request.request_id}") for request in make_requests(prompts[1::2])]
    replica = caching(enabled=False)
    tokens = {request.request_id: run(replica, [request])[request.request_id] for request in requests}
    assert replica.engine.stats().num_prefix_hit_tokens == 0
    return requests, tokens


@pytest.mark.parametrize("num_tokens", [1600, 240], ids=["ample", "scarce"])
def test_tokens_out_of_the_prefix_cache_are_those_of_computing_in_full(caching, alone_without_cache, num_tokens):
    requests, expected = alone_without_cache
    replica = caching(enabled=True, num_tokens=num_tokens)
    assert run(replica, requests) == expected
    first = replica.engine.stats()
    assert run(replica, requests[::-1]) == expected
    second = replica.engine.stats()
    assert second.num_prefix_hit_tokens > first.num_prefix_hit_tokens
    assert [second.num_evictions > 0, second.num_preemptions > 0] == [num_tokens == 240] * 2
    assert second.num_used_blocks == 0


def test_a_later_turn_computes_only_what_is_new_and_goes_on_the_same(caching, alone_without_cache):
    requests, tokens = alone_without_cache
    replica, without = caching(enabled=True), caching(enabled=False)
    run(replica, requests[:1])
    turn = make_requests([[*requests[0].prompt_token_ids, *tokens[requests[0].request_id], 5, 6]], temperature=0.8)
    before = replica.engine.stats()
    assert run(replica, turn) == run(without, turn)
    after = replica.engine.stats()
    num_turn_tokens = len(turn[0].prompt_token_ids)
    block_size = replica.info.block_size
    num_cached = (num_turn_tokens - 3) // block_size * block_size
    assert after.num_prefix_hit_tokens - before.num_prefix_hit_tokens == num_cached
    assert after.num_tokens_computed - before.num_tokens_computed == num_turn_tokens - num_cached + NUM_NEW - 1
