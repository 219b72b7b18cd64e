"""Nothing that a client writes as a request id reaches a sequence of another request: by every API that takes an id,
against requests of one and of several sequences, beams, and lists of prompts.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

import grpc
import httpx
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from holdfast.router.api.grpc import server
from holdfast.router.api.vllm.servicer import SERVICE, VllmEngineServicer
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.resume import Identity, ResumeRecord
from holdfast.router.wire.resume_codec import HOLD, RESUME, resume_json
from holdfast.v1 import inference_pb2
from tests.fakes import FakeReplica, fake_tokens
from tests.loops import on_a_loop
from tests.router.api.open_inference.messages import infer, stream, text
from tests.router.api.test_keys_by_api import locked
from tests.router.api.vllm.test_generate import IdleEngine
from tests.router.core import facts
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import Site, collected, eventually, expected, request, site, with_key

NUM_TOKENS = 6
MINE, THEIRS = "a", "b"
"""Tenants, by their keys."""

FORMS = (
    "X/0",
    "X/1",
    "X.0",
    "X.1",
    "X#0",
    "X/beam-0",
    "X/beam-1",
    "X/0/0",
    "0:1:aX",
    "0:0:X",
    "1:1:aX",
    "(a,X,0)",
)
"""What a client might take for the id of a part of X: as ids inside were once written, and as they might be."""

SEED = 5


async def by_grpc(place: Site, tenant: str, request_id: str, **params: int) -> list[str]:
    """Texts of the completions, in order; `params` are sampling parameters."""
    sampling = inference_pb2.SamplingParams(**{"max_tokens": NUM_TOKENS, "seed": SEED} | params)
    asked = request(sampling_params=sampling, request_id=request_id)
    answer = await place.stub.Generate(asked, metadata=with_key(secret_of(tenant)))
    return [one.text for one in answer.completions]


async def by_grpc_stream(place: Site, tenant: str, request_id: str, n: int = 1) -> list[str]:
    sampling = inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, seed=SEED, n=n)
    asked = request(sampling_params=sampling, request_id=request_id)
    texts = [""] * n
    for chunk in await collected(place.stub.GenerateStream(asked, metadata=with_key(secret_of(tenant)))):
        texts[chunk.sequence_index] += chunk.text
    return texts


async def by_open_inference(place: Site, tenant: str, request_id: str, num_prompts: int = 1) -> list[str]:
    """Requests of one stream, which has the id."""
    sampling = {"max_tokens": NUM_TOKENS, "seed": SEED}
    asked = [infer(id=str(number), stream=True, sampling=sampling) for number in range(num_prompts)]
    call = stream(place, iter(asked), metadata=(*with_key(secret_of(tenant)), ("x-request-id", request_id)))
    answers = [item async for item in call]
    assert not any(item.error_message for item in answers), answers
    return [text([item for item in answers if item.infer_response.id == one.id]) for one in asked]


async def by_http(place: Site, tenant: str, request_id: str, num_prompts: int = 1) -> list[str]:
    """A list of prompts whose stream goes on, as its client says, under that id."""
    record = resume_json(ResumeRecord(identity=Identity(request_id, 1)))
    body = {"prompt": ["hello"] * num_prompts, "max_tokens": NUM_TOKENS, "seed": SEED, "stream": True}
    known = {HOLD: "1", RESUME: str(len(record)), "content-type": "application/json"}
    headers = {"x-api-key": secret_of(tenant), **known}
    texts = [""] * num_prompts
    url = f"http://{place.router.http_address}"
    # Each client would read certificates for 50 ms on the loop of the router, which would then shed requests.
    async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client:
        answer = await client.post("/v1/completions", content=json.dumps(body).encode() + record, headers=headers)
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            said = json.loads(line.removeprefix("data: "))
            for choice in said["choices"]:
                texts[choice["index"]] += choice["text"]
    return texts


VICTIMS: dict[str, Callable[[Site], Awaitable[list[str]]]] = {
    "one sequence": lambda place: by_grpc_stream(place, MINE, "X"),
    "n = 2": lambda place: by_grpc_stream(place, MINE, "X", n=2),
    "best of 3": lambda place: by_grpc(place, MINE, "X", best_of=3),
    "beams": lambda place: by_grpc(place, MINE, "X", beam_width=2, n=2),
    "a stream of requests": lambda place: by_open_inference(place, MINE, "X", 2),
    "a list of prompts": lambda place: by_http(place, MINE, "X", 2),
}

ATTACKS: dict[str, Callable[[Site, str, str], Awaitable[list[str]]]] = {
    "grpc": by_grpc_stream,
    "grpc, n = 2": lambda place, tenant, request_id: by_grpc_stream(place, tenant, request_id, 2),
    "open inference": by_open_inference,
    "http": by_http,
}


def texts(count: int = 1, same_seed: bool = False) -> list[str]:
    """What siblings, or equal prompts of one list, are answered with."""
    return [expected("hello", SEED + (0 if same_seed else index), NUM_TOKENS)[1] for index in range(count)]


async def abort(place: Site, tenant: str, request_id: str) -> bool:
    asked = inference_pb2.AbortRequest(request_id=request_id)
    return (await place.stub.Abort(asked, metadata=with_key(secret_of(tenant)))).was_open


@pytest.mark.in_turn
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("victim", VICTIMS)
@on_a_loop
async def test_no_id_ends_another_request(victim, attack):
    """Another tenant's requests may have any id, the same one too; the same tenant's any but the same."""
    replica = await FakeReplica.start()
    async with site(replica, http=True, **locked(key_of(MINE), key_of(THEIRS))) as place:
        quiet = await VICTIMS[victim](place)
        replica.pause()
        mine = asyncio.ensure_future(VICTIMS[victim](place))
        await replica.until(lambda: replica.running)
        await eventually(lambda: _settled(place))
        asked = [(THEIRS, "X"), *((tenant, form) for form in FORMS for tenant in (MINE, THEIRS))]
        num_before = len(replica.submits)
        attacks = [asyncio.ensure_future(ATTACKS[attack](place, *one)) for one in asked]
        width = 2 if attack.endswith("n = 2") else 1
        await replica.until(lambda: len(replica.submits) == num_before + width * len(asked))
        for form in FORMS:
            if not form.startswith(("X/0", "X/1")):
                assert await abort(place, THEIRS, form), "its own"
        assert not mine.done()
        replica.resume()
        assert await mine == quiet
        for (tenant, form), answer in zip(asked, await asyncio.gather(*attacks), strict=True):
            was_aborted = tenant == THEIRS and form in FORMS and not form.startswith(("X/0", "X/1"))
            assert answer == ([""] * width if was_aborted else texts(width))


async def _settled(place: Site) -> bool:
    """All sequences of what is asked have been opened: a list of prompts is opened one by one."""
    before = place.router.num_open
    for _ in range(50):
        await asyncio.sleep(0)
    return place.router.num_open == before > 0


@on_a_loop
async def test_an_abort_ends_all_that_came_under_an_id_or_one_part_and_nothing_of_another_tenant():
    replica = await FakeReplica.start()
    async with site(replica, **locked(key_of(MINE), key_of(THEIRS))) as place:
        replica.pause()
        both = [asyncio.ensure_future(by_open_inference(place, tenant, "X", 2)) for tenant in (MINE, THEIRS)]
        await replica.until(lambda: len(replica.running) == 4)
        assert await abort(place, THEIRS, "X/1")
        assert not await abort(place, THEIRS, "X/2")
        await replica.until(lambda: len(replica.running) == 3)
        assert await abort(place, THEIRS, "X")
        await replica.until(lambda: len(replica.running) == 2)
        assert not await abort(place, THEIRS, "X")
        replica.resume()
        assert await both[0] == texts(2, same_seed=True)
        assert await both[1] == ["", ""]


@pytest.mark.parametrize("victim", [name for name in VICTIMS if name != "a stream of requests"])
@on_a_loop
async def test_the_same_request_submitted_again_takes_the_place_of_all_its_sequences(victim):
    replica = await FakeReplica.start()
    async with site(replica, http=True, **locked(key_of(MINE))) as place:
        quiet = await VICTIMS[victim](place)
        replica.pause()
        older = asyncio.ensure_future(VICTIMS[victim](place))
        await replica.until(lambda: replica.running)
        await eventually(lambda: _settled(place))
        num_running, num_before = len(replica.running), len(replica.submits)
        newer = asyncio.ensure_future(VICTIMS[victim](place))
        await replica.until(lambda: len(replica.submits) == num_before + num_running)
        await replica.until(lambda: len(replica.running) == num_running)
        replica.resume()
        assert await newer == quiet
        outcome = (await asyncio.gather(older, return_exceptions=True))[0]
        assert isinstance(outcome, grpc.aio.AioRpcError) or outcome != quiet, "the older one ends"


@on_a_loop
async def test_a_submission_of_another_shape_takes_the_place_of_every_sequence():
    """`n` is another one, as of a client that is mistaken: of one id there is one request."""
    replica = await FakeReplica.start()
    async with site(replica, **locked(key_of(MINE))) as place:
        replica.pause()
        older = asyncio.ensure_future(by_grpc_stream(place, MINE, "X", 3))
        await replica.until(lambda: len(replica.running) == 3)
        newer = asyncio.ensure_future(by_grpc_stream(place, MINE, "X"))
        await replica.until(lambda: len(replica.submits) == 4 and len(replica.running) == 1)
        replica.resume()
        assert await newer == texts()
        with pytest.raises(grpc.aio.AioRpcError, match="submitted again"):
            await older


@on_a_loop
async def test_ids_of_the_engine_protocol_are_no_others():
    replica = await FakeReplica.start()
    async with site(replica, **locked(key_of(MINE), key_of(THEIRS))) as place:
        processor = place.router._request_processor
        servicer = VllmEngineServicer(processor, IdleEngine(), facts(block_size=16), max_num_seqs=4)
        served = server.build_server({SERVICE: servicer}, RouterConfig(), LimitsConfig(), gate=processor._gate)
        port = served.add_insecure_port("127.0.0.1:0")
        await served.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)

            async def generated(tenant: str, request_id: str, n: int = 1) -> list[list[int]]:
                params = vllm_engine_pb2.SamplingParams(max_tokens=NUM_TOKENS, seed=SEED, n=n, temperature=0.5)
                prompt = vllm_engine_pb2.TokenizedInput(input_ids=[1, 2])
                asked = vllm_engine_pb2.GenerateRequest(request_id=request_id, tokenized=prompt, sampling_params=params)
                answers = [one async for one in stub.Generate(asked, metadata=with_key(secret_of(tenant)))]
                ends = sorted((one.complete for one in answers), key=lambda end: end.index)
                return [list(end.output_ids) for end in ends]

            replica.pause()
            asked = [
                (MINE, "X", 2),
                (THEIRS, "X", 1),
                *((tenant, form, 1) for form in FORMS for tenant in (MINE, THEIRS)),
            ]
            answers = [asyncio.ensure_future(generated(*one)) for one in asked]
            await replica.until(lambda: len(replica.running) == len(asked) + 1)
            aborted = vllm_engine_pb2.AbortRequest(request_ids=["nobody"])
            await stub.Abort(aborted, metadata=with_key(secret_of(THEIRS)))
            replica.resume()
            for (_, _, n), answer in zip(asked, await asyncio.gather(*answers), strict=True):
                assert answer == [fake_tokens([1, 2], SEED + index, NUM_TOKENS) for index in range(n)]
        await served.stop(None)
