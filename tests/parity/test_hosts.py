"""One pipeline, two hosts: the same requests, offline and through a served router over gRPC, are answered the same.

Each host has a replica of its own of the bundled model, with the same settings, and is asked one request after the
other. Everything that both tell is compared to the bit: text, tokens, log-probabilities, usage, errors and their words.
The pipeline is the same for both programs, but not what reaches it of a step, so some requests are asked of both.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.local_router import REPLICA_ID
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.cluster.offline.request_handle import by_token_id
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.generation import Generation
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.config import CacheConfig, HealthConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.errors import DeadlineExceededError, HoldfastError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import Priority, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams

TIMEOUT_S: Final = 120
CONFIG: Final = located(
    WorkerConfig(
        model=ModelConfig(max_model_len=320),
        parallel=ParallelConfig(num_threads=1),
        cache=CacheConfig(num_blocks=200),
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16),
        health=HealthConfig(frozen_after_s=60.0, self_check_every_s=0.0),
    )
)
PROMPT: Final = "The capital of France is"
LONG: Final = " ".join(f"{number} and" for number in range(60))
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"enum": ["Anna", "Tom"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """A request: the prompt, sampling parameters by name, and how it is to be served."""

    prompt: Any = PROMPT
    params: dict[str, Any] = field(default_factory=dict)
    service: dict[str, Any] = field(default_factory=dict)
    is_refused: bool = False

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 12, "seed": 7, "temperature": 0.8, **self.params})


def case(*args: Any, service: dict[str, Any] | None = None, **params: Any) -> Case:
    return Case(*args, params=params, service=service or {})


def refused(*args: Any, service: dict[str, Any] | None = None, **params: Any) -> Case:
    return Case(*args, params=params, service=service or {}, is_refused=True)


ANSWERED: Final = {
    "drawn": case(),
    "no text": case(""),
    "greedy": case(temperature=0.0),
    "token ids": case([1, 282, 298, 279, 889, 268]),
    "one token id": case([282]),
    "hot, by top k": case(temperature=5.0, top_k=5),
    "top k of all": case(top_k=-1),
    "top k beyond all": case(top_k=10**6),
    "top p": case(top_p=0.7),
    "min p": case(min_p=0.1),
    "many tokens": case(max_tokens=60, ignore_eos=True),
    "as many tokens as fit": case(LONG, max_tokens=None, ignore_eos=True, temperature=3.0),
    "least tokens": case(min_tokens=10, max_tokens=20),
    "stop string": case(temperature=0.0, max_tokens=40, stop=["."]),
    "stop string kept": case(temperature=0.0, max_tokens=40, stop=".", include_stop_str_in_output=True),
    "stop strings that do not come": case(stop=["xyzzy", "plugh"]),
    "stop string with logprobs": case(temperature=0.0, max_tokens=40, stop=".", logprobs=3),
    "stop token": case(temperature=0.0, stop_token_ids=[268, 279]),
    "special tokens": case(skip_special_tokens=False, max_tokens=40),
    "repetition penalty": case(temperature=0.0, repetition_penalty=1.7),
    "presence and frequency": case(presence_penalty=1.5, frequency_penalty=-0.5),
    "logit bias": case(logit_bias={300: 5.5, 301: -100.0}),
    "allowed tokens": case(allowed_token_ids=[300, 301, 302]),
    "bad words": case(temperature=0.0, bad_words=["Paris", "the"]),
    "logprobs": case(logprobs=5),
    "logprobs of the drawn alone": case(logprobs=0),
    "prompt logprobs": case(prompt_logprobs=3),
    "both logprobs": case(LONG, logprobs=2, prompt_logprobs=0),
    "n": case(n=3),
    "n with logprobs": case(n=2, logprobs=1, prompt_logprobs=1),
    "best of": case(n=2, best_of=4),
    "best of with logprobs": case(best_of=3, logprobs=2, prompt_logprobs=2),
    "n with a stop string": case(n=3, stop="a", max_tokens=30),
    "echo": case(echo=True),
    "echo of token ids": case([282, 298, 279], echo=True, n=2),
    "echo of what is kept": case(LONG, echo=True, truncate_prompt_tokens=10),
    "truncated to fit": case(LONG * 20, truncate_prompt_tokens=-1),
    "beams": case(temperature=1.0, n=3, beam_width=4),
    "one beam, with a penalty and an echo": case(n=1, beam_width=2, length_penalty=-1.0, echo=True),
    "beams that stop": case(n=2, beam_width=3, stop_token_ids=[16, 268], max_tokens=20),
    "a regex": case(structured_outputs={"regex": "(ab|cd){2,5}"}),
    "a choice": case(structured_outputs={"choice": ["hens", "ducks"]}),
    "a schema": case(structured_outputs={"json": SCHEMA}, max_tokens=60),
    "any object": case(structured_outputs={"json_object": True}, max_tokens=40),
    "a grammar": case(structured_outputs={"grammar": 'start: "yes" | "no"'}),
    "high priority": case(service={"priority": Priority.CRITICAL}),
    "a tenant": case(service={"tenant": "gold"}),
    "a salt": case(LONG, service={"cache_salt": "mine"}),
    "the same salt": case(LONG, service={"cache_salt": "mine"}),
    "no salt": case(LONG),
    "time enough": case(service={"timeout_s": 100.0}),
    "a name": case(service={"request_id": "mine"}),
}

ON_THE_HF_BACKEND: Final = ("drawn", "greedy", "both logprobs", "n with logprobs", "best of", "echo", "a name")
"""Asked there as well."""

REFUSED: Final = {
    "no token ids": refused([]),
    "beyond the vocabulary": refused([5, 5000]),
    "too long": refused(LONG * 20),
    "too long in ids": refused([5] * 5000),
    "too large": refused("x" * 600_000),
    "a stop token beyond the vocabulary": refused(stop_token_ids=[5000]),
    "a bias beyond the vocabulary": refused(logit_bias={5000: 1.0}),
    "an allowed token beyond the vocabulary": refused(allowed_token_ids=[5000]),
    "too many stop strings": refused(stop=["x"] * 65),
    "a long stop string": refused(stop="x" * 1025),
    "too many bad words": refused(bad_words=["x"] * 257),
    "a long bad word": refused(bad_words="x" * 257),
    "too many completions": refused(n=65),
    "too many to choose from": refused(best_of=65),
    "a long grammar": refused(structured_outputs={"regex": "x" * 70_000}),
    "a schema that cannot be kept": refused(structured_outputs={"json": {"type": "array", "uniqueItems": True}}),
    "a regex that is none": refused(structured_outputs={"regex": "("}),
    "two structures": refused(structured_outputs={"regex": "a", "choice": ["a"]}),
    "a hot text": refused(temperature="hot"),
    "a cold number": refused(temperature=-1.0),
    "a penalty too large": refused(presence_penalty=3.0),
    "logprobs of too many": refused(logprobs=21),
    "beams and logprobs": refused(beam_width=2, logprobs=1),
    "fewer than n": refused(n=3, best_of=2),
    "a long tenant": refused(service={"tenant": "x" * 129}),
    "a long salt": refused(service={"cache_salt": "x" * 129}),
    "a long name": refused(service={"request_id": "x" * 129}),
    "a name of no letters": refused(service={"request_id": "\u00e9"}),
    "a timeout in the past": refused(service={"timeout_s": -1.0}),
    "a timeout too long": refused(service={"timeout_s": 3601.0}),
    "too little time": refused(max_tokens=None, ignore_eos=True, service={"timeout_s": 0.001}),
    "too little time for beams": refused(max_tokens=100, ignore_eos=True, beam_width=4, service={"timeout_s": 0.05}),
}


@dataclass(frozen=True)
class Outcome:
    """What both hosts tell of a request, in the same words."""

    completions: Any = None
    prompt_logprobs: Any = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: HoldfastError | None = None


def told_offline(output: RequestOutput) -> Outcome:
    return Outcome(
        completions=[
            (
                one.index,
                one.text,
                one.token_ids,
                one.finish_reason,
                one.cumulative_logprob,
                one.logprobs or [],
            )
            for one in output.outputs
        ],
        prompt_logprobs=output.prompt_logprobs or [],
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
    )


def told_by_a_server(generation: Generation, tokenizer: Tokenizer) -> Outcome:
    def rendered(items: tuple[TokenLogprob | None, ...]) -> list[Any]:
        return [None if item is None else by_token_id(item, tokenizer) for item in items]

    return Outcome(
        completions=[
            (
                one.sequence_index,
                one.text,
                list(one.token_ids),
                one.finish_reason,
                one.cumulative_logprob,
                rendered(one.logprobs),
            )
            for one in generation.completions
        ],
        prompt_logprobs=rendered(generation.prompt_logprobs),
        num_prompt_tokens=generation.usage.num_prompt_tokens,
        num_cached_tokens=generation.usage.num_cached_tokens,
    )


def attempted(ask: Callable[[], Outcome]) -> Outcome:
    try:
        return ask()
    except HoldfastError as error:
        return Outcome(error=error)


@asynccontextmanager
async def served_client(config: WorkerConfig):
    """A client of a router of a replica, each with its own end of a real link."""
    replica = await asyncio.to_thread(Replica.start, config)
    link_server = await LinkServer.start(replica, replica_id="served")
    endpoint = ReplicaEndpoint(
        replica_id="served",
        address=link_server.address,
        model=replica.info.model,
        model_path=replica.info.path,
    )
    router = await Router.start(RouterConfig(), LimitsConfig(), StaticDirectory([endpoint]))
    try:
        async with AsyncClient(router.address) as client:
            while not (await client.list_models()).models:
                await asyncio.sleep(0.01)
            yield client
    finally:
        await router.stop()
        await link_server.stop()
        await asyncio.to_thread(replica.stop)


class Served:
    """The served host, on an event loop in a thread of its own."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._client: Future[AsyncClient] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        self._client.result(TIMEOUT_S)

    async def _run(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        async with served_client(self._config) as client:
            self._client.set_result(client)
            await self._is_over.wait()

    def ask(self, asked: Case) -> Generation:
        work = self._client.result().generate(asked.prompt, asked.sampling_params(), **asked.service)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()


@pytest.fixture(scope="module")
def config(executor: str) -> WorkerConfig:
    return CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"executor": executor})})


@pytest.fixture(scope="module")
def engine(config: WorkerConfig) -> Iterator[InferenceEngine]:
    with InferenceEngine(config=config) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(config: WorkerConfig) -> Iterator[Served]:
    served = Served(config)
    yield served
    served.stop()


def ask_offline(engine: InferenceEngine, asked: Case) -> RequestOutput:
    return engine.submit_request(asked.prompt, asked.sampling_params(), **asked.service).result(TIMEOUT_S)


# The executor is a parameter of its own: as one of a pair with the name, hosts would be made anew for each name.


@pytest.mark.parametrize("executor", ["native"], indirect=True)
@pytest.mark.parametrize("name", ANSWERED)
def test_an_answer_is_the_same_to_the_bit(engine: InferenceEngine, served: Served, name: str):
    compare(engine, served, ANSWERED[name])


@pytest.mark.parametrize("executor", ["hf"], indirect=True)
@pytest.mark.parametrize("name", ON_THE_HF_BACKEND)
def test_an_answer_of_the_hf_backend_is_the_same_to_the_bit(engine: InferenceEngine, served: Served, name: str):
    compare(engine, served, ANSWERED[name])


def compare(engine: InferenceEngine, served: Served, asked: Case) -> None:
    here, there = ask_offline(engine, asked), served.ask(asked)
    assert told_offline(here) == told_by_a_server(there, engine.tokenizer)
    assert there.system_fingerprint == ReplicaFacts.of(REPLICA_ID, engine.info).fingerprint
    if asked.sampling_params().num_sequences == len(here.outputs) and asked.params.get("beam_width") is None:
        assert there.usage.num_completion_tokens == sum(len(one.token_ids) for one in here.outputs)
    if "request_id" in asked.service:
        assert here.request_id == there.request_id == asked.service["request_id"]


@pytest.mark.parametrize("executor", ["native"], indirect=True)
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_the_same_to_the_word(engine: InferenceEngine, served: Served, name: str):
    asked = REFUSED[name]
    here = attempted(lambda: told_offline(ask_offline(engine, asked))).error
    there = attempted(lambda: told_by_a_server(served.ask(asked), engine.tokenizer)).error
    assert here is not None
    assert there is not None
    assert type(here) is type(there)
    if not isinstance(here, DeadlineExceededError):  # how far a request came in its time differs from run to run
        assert str(here) == str(there)
