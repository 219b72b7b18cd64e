import asyncio
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.errors import (
    ConfigurationError,
    DeadlineExceededError,
    HoldfastError,
    InvalidRequestError,
    RequestAbortedError,
    RequestSupersededError,
)
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from tests import loops

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


def config(model: Path) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(model=str(model), dtype="float32"),
        parallel=ParallelConfig(num_threads=1),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(num_scheduler_steps=1),  # else 200 tokens are there before somebody can cancel them
    )


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(config=config(tiny_model)) as engine:
        yield engine


class Recorder:
    """A callback that keeps what it is told."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.first = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.first.set()


def all_blocks_are_free(engine: InferenceEngine) -> bool:
    stats = engine.get_stats()
    return stats.num_free_blocks == stats.num_total_blocks


def test_no_hang_supervisor_watches_the_process_of_a_user(tiny_model):
    before = psutil.Process().children()
    with InferenceEngine(config=config(tiny_model)) as engine:
        engine.submit_request("hello", GREEDY).result(30)
        assert psutil.Process().children() == before


def test_callbacks_see_the_text_grow_and_its_end(engine):
    recorder = Recorder()
    output = engine.submit_request("hello", GREEDY, Priority.HIGH, recorder).result(30)
    texts = [seen.outputs[0].text for seen in recorder.outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [seen.finished for seen in recorder.outputs].count(True) == 1
    assert recorder.outputs[-1] == output
    assert [len(seen.outputs[0].token_ids) for seen in recorder.outputs] == list(range(1, 11))


def test_a_callback_that_fails_harms_nobody(engine):
    def broken(output: RequestOutput) -> None:
        raise RuntimeError("a bug of the caller")

    assert engine.submit_request("hello", GREEDY, callback=broken).result(30).finished
    assert engine.submit_request("hello", GREEDY).result(30).finished


def test_requests_may_come_from_many_threads(engine):
    outputs: dict[int, RequestOutput] = {}

    def ask(number: int) -> None:
        outputs[number] = engine.submit_request(f"prompt {number % 4}", GREEDY).result(30)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(12):
        assert outputs[number].outputs == outputs[number % 4].outputs
    assert len({output.request_id for output in outputs.values()}) == 12


def test_cancelling_ends_a_request_with_what_there_is(engine):
    recorder = Recorder()
    handle = engine.submit_request("hello", ENDLESS, callback=recorder)
    assert recorder.first.wait(30)
    handle.cancel()
    completion = handle.result(30).outputs[0]
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 200
    assert all_blocks_are_free(engine)


async def _await_and_cancel(engine: InferenceEngine) -> None:
    first, second = await asyncio.gather(
        engine.submit_request_async("hello", GREEDY), engine.submit_request_async("hello", GREEDY)
    )
    assert first.outputs == second.outputs
    task = asyncio.create_task(engine.submit_request_async("hello", ENDLESS))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_requests_can_be_awaited_and_their_tasks_cancelled(engine):
    loops.run(_await_and_cancel(engine))
    assert engine.submit_request("hello", GREEDY).result(30).finished
    assert all_blocks_are_free(engine)


def test_stopping_answers_everyone(tiny_model):
    engine = InferenceEngine(config=config(tiny_model))
    engine.start()
    recorder = Recorder()
    handles = [engine.submit_request("hello", ENDLESS, callback=recorder) for _ in range(4)]
    assert recorder.first.wait(30)
    engine.stop()
    engine.stop()
    assert {handle.result(0).outputs[0].finish_reason for handle in handles} == {"abort"}
    with pytest.raises(RequestAbortedError):
        engine.submit_request("hello", GREEDY)


def test_a_request_that_comes_to_nothing_says_why(engine):
    recorder = Recorder()
    handle = engine.submit_request("hello", ENDLESS, callback=recorder, timeout_s=1e-6)
    with pytest.raises(DeadlineExceededError):
        handle.result(30)
    assert isinstance(recorder.outputs[-1].error, DeadlineExceededError)


def test_a_request_that_is_refused_says_why(engine):
    """At once; or, where the caller does not wait for that, by the handle and the callback."""
    recorder = Recorder()
    for prompt, field in (("x" * 2000, "text"), ([], "token_ids"), ([999], "token_ids")):
        with pytest.raises(InvalidRequestError, match=field) as refused:
            engine.submit_request(prompt, GREEDY, callback=recorder)
        assert not recorder.outputs
        handle = engine.enqueue_request(prompt, GREEDY, recorder)
        with pytest.raises(InvalidRequestError) as same:
            handle.result(30)
        assert str(recorder.outputs.pop().error) == str(same.value) == str(refused.value)


def test_a_callback_may_submit_and_abort(engine):
    """It runs on the thread that would have to answer it."""
    handles = []

    def go_on(output: RequestOutput) -> None:
        if not handles:
            handles.append(engine.submit_request("hello", GREEDY))
            handles.append(engine.submit_request([], GREEDY))
            engine.abort(output.request_id)

    assert engine.submit_request("hello", ENDLESS, callback=go_on).result(30).outputs[0].finish_reason == "abort"
    assert handles[0].result(30).finished
    with pytest.raises(InvalidRequestError):
        handles[1].result(30)


def test_a_request_may_be_given_a_name(engine):
    first = engine.submit_request("hello", GREEDY, request_id="mine")
    assert (first.request_id, first.result(30).request_id) == ("mine", "mine")
    assert engine.submit_request("hello", GREEDY).request_id == "request-1"
    older, newer = (engine.submit_request("hello", ENDLESS, request_id="same") for _ in range(2))
    with pytest.raises(RequestSupersededError):
        older.result(30)
    engine.abort("same")
    assert newer.result(30).outputs[0].finish_reason == "abort"
    default = engine.submit_request("hello", ENDLESS)
    given = engine.submit_request("hello", ENDLESS, request_id=default.request_id)
    engine.abort(default.request_id)
    assert given.result(30).outputs[0].finish_reason == "abort"
    assert not default.future.done(), "the id is the other one's own"
    engine.abort(default.request_id)
    assert default.result(30).outputs[0].finish_reason == "abort", "nobody else is called so any more"


def test_a_replica_that_fails_raises_for_everyone_who_waits(engine):
    recorder = Recorder()
    handle = engine.submit_request("hello", ENDLESS, callback=recorder)
    assert recorder.first.wait(30)
    failure = HoldfastError("the device is on fire")
    engine._replica.engine.fail(failure)
    with pytest.raises(HoldfastError, match="on fire"):
        handle.result(30)
    with pytest.raises(HoldfastError, match="on fire"):
        engine.submit_request("hello", GREEDY)


def test_stats_count_what_was_done(engine):
    engine.submit_request("hello", GREEDY).result(30)
    stats = engine.get_stats()
    assert (stats.num_requests, stats.num_tokens_generated) == (1, 10)


def test_settings_may_be_given_as_in_a_file(tiny_model):
    tree = {
        "model": {"dtype": "float32"},
        "parallel": {"num_threads": 1},
        "cache": {"num_blocks": 20, "block_size": 16},
    }
    with InferenceEngine(str(tiny_model), tree) as engine:
        assert (engine.info.num_blocks, engine.info.block_size) == (20, 16)
    with pytest.raises(ConfigurationError, match=r"cache.blocks \(from InferenceEngine"):
        InferenceEngine(str(tiny_model), {"cache": {"blocks": 20}})


def test_logits_processors_are_felt_from_end_to_end(engine):
    """A bad word is banned by its text, a token forced by its id, and the end of sequence kept off until its time."""
    letter = engine.tokenizer.encode("x")[0]
    wanted = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={letter: 100.0})
    assert engine.submit_request("hello", wanted).result(30).outputs[0].text == "xxxxx"
    unwanted = replace(wanted, bad_words=["xx"])
    assert engine.submit_request("hello", unwanted).result(30).outputs[0].text.count("x") == 3
    forced = SamplingParams(temperature=0.0, max_tokens=10, min_tokens=4, logit_bias={256: 100.0, 7: 90.0})
    completion = engine.submit_request("hello", forced).result(30).outputs[0]
    assert (completion.token_ids, str(completion.finish_reason)) == ([7] * 4 + [256], "stop")


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_token_ids_beyond_the_vocabulary_are_refused_by_name(engine, name):
    params = SamplingParams(**{name: {999: 1.0} if name == "logit_bias" else [999]})
    with pytest.raises(InvalidRequestError, match=rf"sampling_params\.{name} = 999"):
        engine.submit_request("hello", params)


def test_cancelling_ends_every_completion(engine):
    recorder = Recorder()
    handle = engine.submit_request("hello", replace(ENDLESS, n=3), callback=recorder)
    assert recorder.first.wait(30)
    handle.cancel()
    assert [str(one.finish_reason) for one in handle.result(30).outputs] == ["abort"] * 3
    assert all_blocks_are_free(engine)


def test_a_callback_sees_nothing_of_a_ranked_request_before_its_end(engine):
    recorder = Recorder()
    output = engine.submit_request("hello", replace(GREEDY, best_of=3), callback=recorder).result(30)
    assert recorder.outputs == [output]


def test_a_default_id_is_no_id_that_a_caller_gives(engine):
    """Whatever callers write, requests without an id of their own go on beside it."""
    handles = [engine.submit_request("hello", replace(ENDLESS, n=2, max_tokens=40)) for _ in range(3)]
    names = [f"{name}{part}" for name in ("request-0", "request-1", "request-3") for part in ("", "/0", "/1", ".0")]
    given = [engine.submit_request("hello", GREEDY, request_id=name) for name in names]
    assert [handle.request_id for handle in handles] == ["request-0", "request-1", "request-2"]
    for handle in handles:
        output = handle.result(60)
        assert (output.request_id, len(output.outputs)) == (handle.request_id, 2)
        assert [len(one.token_ids) for one in output.outputs] == [40, 40]
    assert [handle.result(60).request_id for handle in given] == names


def test_a_completion_that_comes_to_nothing_ends_its_siblings(engine):
    handle = engine.submit_request("hello", replace(ENDLESS, n=3), timeout_s=1e-6)
    with pytest.raises(DeadlineExceededError):
        handle.result(30)
    assert engine.submit_request("hello", GREEDY).result(30).finished
    assert all_blocks_are_free(engine)


def test_a_completion_that_is_refused_ends_its_siblings(engine):
    with pytest.raises(InvalidRequestError):
        engine.submit_request("x" * 2000, replace(GREEDY, n=3))
    assert engine.submit_request("hello", GREEDY).result(30).finished
    assert all_blocks_are_free(engine)


def test_a_request_ends_when_its_time_is_up(engine):
    endless = engine.submit_request("hello", ENDLESS, timeout_s=0.001)
    with pytest.raises(DeadlineExceededError):
        endless.result(30)
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        engine.submit_request("hello", ENDLESS, timeout_s=0)
    assert all_blocks_are_free(engine)


def test_only_requests_with_the_same_salt_find_each_others_prefixes(engine):
    prompt = list(range(1, 40))
    found = [
        engine.submit_request(prompt, GREEDY, cache_salt=salt).result(30).num_cached_tokens for salt in ("a", "b", "a")
    ]
    assert found == [0, 0, 32]
