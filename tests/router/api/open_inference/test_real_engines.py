"""The Open Inference Protocol in front of real engines: log-probabilities, beams, and a replica lost in mid-stream."""

import asyncio
import json

import pytest

from tests.loops import on_a_loop, on_each_loop
from tests.pseudo_model import pseudo_completion
from tests.router.api.open_inference.messages import infer, stream, text, unary, values
from tests.router.links.test_real_link import VOCAB_SIZE, RealReplica
from tests.router.site import refusal, site
from tests.worker.scheduler.test_logits_settings import LogitsRunner

REPORTS = {f"return_{name}": True for name in ("logprobs", "cumulative_logprob", "num_output_tokens", "finish_reason")}


@on_each_loop
async def test_logprobs_are_by_token_and_add_up_to_the_sum_in_both_ways():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        sampling = {"max_tokens": "6", "seed": "1", "logprobs": "2"}
        whole = values(await unary(place, "ModelInfer")(infer(sampling=sampling, **REPORTS)))
        (positions,) = map(json.loads, whole["logprobs"])
        assert len(positions) == 6
        assert all({"logprob", "rank", "decoded_token"} == set(one) for at in positions for one in at.values())
        assert all({1, 2} <= {one["rank"] for one in at.values()} for at in positions)
        assert all(one["decoded_token"] == decoded(int(key)) for at in positions for key, one in at.items())
        answers = [item async for item in stream(place, iter([infer(sampling=sampling, stream=True, **REPORTS)]))]
        steps = [values(item.infer_response) for item in answers]
        assert [at for step in steps for at in json.loads(step["logprobs"][0])] == positions
        assert steps[-1]["cumulative_logprob"] == pytest.approx(whole["cumulative_logprob"], abs=1e-5)
        assert steps[-1]["cumulative_logprob"][0] < 0


def decoded(token_id: int) -> str:
    return bytes([token_id]).decode(errors="replace")


@on_a_loop
async def test_outputs_ask_for_the_numbers_that_they_need():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        answer = values(await unary(place, "ModelInfer")(infer(outputs=["logprobs", "cumulative_logprob"])))
        assert [len(at) for at in json.loads(answer["logprobs"][0])] == [1] * 8
        assert answer["cumulative_logprob"][0] < 0


@on_a_loop
async def test_a_beam_search_is_answered_whole():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        sampling = {"max_tokens": 3, "n": 2, "beam_width": "2"}
        flags = {"return_cumulative_logprob": True, "return_num_output_tokens": True}
        answer = values(await unary(place, "ModelInfer")(infer(sampling=sampling, **flags)))
        assert answer["num_output_tokens"] == [3, 3]
        assert answer["cumulative_logprob"][0] >= answer["cumulative_logprob"][1]
        refused = await refusal(unary(place, "ModelInfer")(infer(sampling=sampling, return_logprobs=True)))
        assert refused.field == "sampling_parameters.logprobs"


@on_each_loop
async def test_streams_of_an_engine_that_ends_in_the_middle_go_on_elsewhere_with_the_same_tokens():
    ending = await RealReplica.start("ending")
    async with site(ending, await RealReplica.start("going on")) as place:
        requests = [infer(stream=True, sampling={"max_tokens": 300, "seed": n}, id=str(n)) for n in range(8)]
        found: dict[str, list] = {str(n): [] for n in range(8)}
        num_read = 0
        async for answer in stream(place, iter(requests)):
            assert not answer.error_message
            found[answer.infer_response.id].append(answer)
            num_read += 1
            if num_read == 80:
                await asyncio.to_thread(ending.engine.stop)
        for seed, answers in enumerate(found.values()):
            token_ids = pseudo_completion(list(b"hello"), seed, 300, VOCAB_SIZE)
            assert text(answers) == bytes(token_ids).decode(errors="replace")
