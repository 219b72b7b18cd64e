"""ModelStreamInfer over real gRPC: many requests on one stream, their ends, errors, cancellation, and lost replicas."""

import asyncio

import grpc

from holdfast.foreign import grpc_service_pb2 as pb
from holdfast.router.api.open_inference import servicer
from holdfast.router.config import LimitsConfig, RouterConfig
from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.router.api.open_inference.messages import STREAM, infer, is_final, stream, text, values
from tests.router.site import eventually, expected, num_open_is, site


def streamed(prompt="hello", *, num_tokens=8, seed=1, **fields):
    return infer(prompt, stream=True, sampling={"max_tokens": str(num_tokens), "seed": str(seed)}, **fields)


async def rest(call):
    """What is still to come; for calls that are read from one by one."""
    while (answer := await call.read()) is not grpc.aio.EOF:
        yield answer


async def by_id(call) -> dict[str, list]:
    """All answers, by the id of their requests, in the order of arrival."""
    found = {}
    async for answer in call:
        found.setdefault(answer.infer_response.id, []).append(answer)
    return found


@on_each_loop
async def test_a_stream_of_one_request_has_its_text_in_pieces_and_says_which_is_the_last():
    async with site(await FakeReplica.start()) as place:
        flags = {"return_finish_reason": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
        answers = [item async for item in stream(place, iter([streamed(id="a", num_tokens=20, **flags)]))]
        assert text(answers) == expected("hello", 1, 20)[1], "without the prompt"
        found = [values(item.infer_response) for item in answers]
        assert sum(item["num_output_tokens"][0] for item in found) == 20
        assert {item["num_input_tokens"][0] for item in found} == {5}
        assert [item["finish_reason"][0] for item in found] == [b"None"] * (len(found) - 1) + [b"length"]
        assert [is_final(item) for item in answers] == [False] * (len(answers) - 1) + [True]
        assert len(answers) > 1


@on_each_loop
async def test_an_empty_last_answer_comes_for_those_who_want_one():
    async with site(await FakeReplica.start()) as place:
        wish = {"triton_enable_empty_final_response": True}
        for is_stream in (True, False):
            requests = [infer(id="a", stream=is_stream, parameters=wish)]
            *answers, last = [item async for item in stream(place, iter(requests))]
            assert [is_final(item) for item in answers] == [False] * len(answers)
            assert is_final(last)
            assert (last.infer_response.id, last.infer_response.model_name) == ("a", "fake")
            assert not last.infer_response.outputs


@on_each_loop
async def test_many_requests_of_one_stream_run_at_the_same_time():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        requests = [streamed(f"prompt {index}", num_tokens=30, seed=index, id=str(index)) for index in range(64)]
        call = stream(place, iter(requests))
        await replica.until(lambda: len(replica.running) == 64)
        replica.resume()
        found = await by_id(call)
        assert {index: text(answers) for index, answers in found.items()} == {
            str(index): expected(f"prompt {index}", index, 30)[1] for index in range(64)
        }
        assert all(is_final(answers[-1]) for answers in found.values())


@on_each_loop
async def test_a_short_request_overtakes_a_long_one():
    async with site(await FakeReplica.start()) as place:
        call = stream(place)
        await call.write(streamed(id="long", num_tokens=10**6))
        assert (await call.read()).infer_response.id == "long"
        await call.write(streamed(id="short", num_tokens=3))
        while (answer := await call.read()).infer_response.id != "short" or not is_final(answer):
            pass
        call.cancel()


@on_each_loop
async def test_completions_of_one_request_stay_apart():
    async with site(await FakeReplica.start()) as place:
        sampling = {"max_tokens": 20, "seed": 1, "n": 3}
        requests = [infer(stream=True, sampling=sampling, return_finish_reason=True)]
        texts, reasons = [b"", b"", b""], []
        async for answer in stream(place, iter(requests)):
            found = values(answer.infer_response)
            texts = [before + new for before, new in zip(texts, found["text_output"], strict=True)]
            reasons.append(found["finish_reason"])
        assert [item.decode() for item in texts] == [expected("hello", seed, 20)[1] for seed in (1, 2, 3)]
        assert reasons[-1] == [b"length"] * 3
        assert is_final(answer)


@on_each_loop
async def test_a_request_without_stream_is_answered_once():
    async with site(await FakeReplica.start()) as place:
        (answer,) = [item async for item in stream(place, iter([infer(id="a")]))]
        assert text([answer]) == "hello" + expected("hello", 1, 8)[1]
        assert is_final(answer)


@on_each_loop
async def test_errors_are_answers_and_the_stream_goes_on():
    async with site(await FakeReplica.start()) as place:
        raw = place.channel.stream_stream(STREAM)
        requests = [
            b"\xff\xff\xff",
            infer(id="bad", stream=True, sampling={"top_p": "7"}).SerializeToString(),
            infer(id="unknown", model_name="gpt-9").SerializeToString(),
            infer(id="best", stream=True, sampling={"best_of": 3}).SerializeToString(),
            streamed(id="good").SerializeToString(),
        ]
        answers = [pb.ModelStreamInferResponse.FromString(item) async for item in raw(iter(requests))]
        errors = {item.infer_response.id: item for item in answers if item.error_message}
        assert set(errors) == {"", "bad", "unknown", "best"}
        assert "sampling_parameters.top_p = 7.0: must be in (0, 1]" in errors["bad"].error_message
        assert "served: fake" in errors["unknown"].error_message
        codes = {name: item.infer_response.parameters["error_code"].string_param for name, item in errors.items()}
        assert (codes["bad"], codes["unknown"]) == ("INVALID_ARGUMENT", "NOT_FOUND")
        assert all(map(is_final, errors.values()))
        good = [item for item in answers if item.infer_response.id == "good"]
        assert text(good) == expected("hello", 1, 8)[1]


@on_a_loop
async def test_a_full_queue_is_an_error_that_says_when_to_come_again():
    replica = await FakeReplica.start()
    replica.pause()
    config, limits = RouterConfig(max_waiting_per_replica=1), LimitsConfig(max_queued=1)
    async with site(replica, config=config, limits=limits) as place:
        call = stream(place)
        for number in range(3):
            await call.write(streamed(id=str(number)))
        refused = await call.read()
        assert refused.infer_response.id == "2"
        parameters = refused.infer_response.parameters
        assert parameters["error_code"].string_param == "RESOURCE_EXHAUSTED"
        assert parameters["retry_after_ms"].int64_param > 0
        replica.resume()
        await call.done_writing()
        found = await by_id(rest(call))
        assert all(text(found[name]) == expected("hello", 1, 8)[1] for name in "01")


@on_each_loop
async def test_cancelling_a_stream_takes_its_requests_off_the_replica_within_a_step():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = stream(place)
        for number in range(3):
            await call.write(streamed(id=str(number), num_tokens=10**6, seed=number))
        await replica.until(lambda: len(replica.running) == 3)
        assert await call.read()
        attempts, num_steps = set(replica.running), replica.num_steps
        call.cancel()
        await replica.until(lambda: set(replica.aborted) == attempts)
        assert replica.num_steps - num_steps < 100, "aborts, and not the ends of the sequences"
        await place.until_idle()


@on_each_loop
async def test_an_end_of_the_requests_is_no_end_of_the_answers():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = stream(place)
        await call.write(streamed())
        await call.done_writing()
        await replica.until(lambda: replica.running)
        replica.resume()
        assert text([item async for item in rest(call)]) == expected("hello", 1, 8)[1]
        assert (await call.code()).name == "OK"


@on_each_loop
async def test_ids_of_a_streams_requests_follow_from_that_of_its_metadata():
    async with site(await FakeReplica.start()) as place:
        unseeded = [infer(sampling={"max_tokens": 1}) for _ in range(2)]
        for _ in range(2):
            metadata = (("x-request-id", "mine"),)
            assert len([item async for item in stream(place, iter(unseeded), metadata=metadata)]) == 2
        seeds = [submit.sampling_params.seed for submit in place.replicas[0].submits]
        assert sorted(seeds[:2]) == sorted(seeds[2:]), "seeds follow from ids"
        assert len(set(seeds)) == 2


@on_each_loop
async def test_streams_go_on_elsewhere_when_their_replica_is_lost():
    first, second = await FakeReplica.start("a"), await FakeReplica.start("b")
    async with site(first, second) as place:
        requests = [streamed(f"prompt {index}", num_tokens=200, seed=index, id=str(index)) for index in range(16)]
        call = stream(place, iter(requests))
        found, num_read = {}, 0
        async for answer in call:
            found.setdefault(answer.infer_response.id, []).append(answer)
            num_read += 1
            if num_read == 100:
                await first.kill()
        assert {index: text(answers) for index, answers in found.items()} == {
            str(index): expected(f"prompt {index}", index, 200)[1] for index in range(16)
        }
        assert not any(answer.error_message for answers in found.values() for answer in answers)
        assert any(submit.output_token_ids for submit in second.submits), "some went on after what they had"


@on_each_loop
async def test_a_lost_only_replica_is_waited_for_and_the_stream_goes_on():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = stream(place, iter([streamed(num_tokens=100)]))
        answers = [await call.read() for _ in range(5)]
        await replica.kill()
        again = await FakeReplica.start(port=replica.port)
        place.replicas.append(again)
        answers += [item async for item in rest(call)]
        assert text(answers) == expected("hello", 1, 100)[1]
        assert again.submits[0].output_token_ids
        await again.kill()


@on_a_loop
async def test_a_stream_that_is_not_read_holds_up_nobody_and_has_a_limit(monkeypatch):
    monkeypatch.setattr(servicer, "MAX_OPEN", 8)
    replica = await FakeReplica.start(step_s=0)
    async with site(replica) as place:
        call = stream(place)
        writing = asyncio.create_task(write_all(call, [streamed(num_tokens=10**6, seed=n) for n in range(50)]))
        await replica.until(lambda: len(replica.running) == 8)
        other = [item async for item in stream(place, iter([streamed()]))]
        assert text(other) == expected("hello", 1, 8)[1]
        assert place.router.num_open == 8
        call.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await eventually(lambda: num_open_is(place, 0))


async def write_all(call, requests) -> None:
    for message in requests:
        await call.write(message)


@on_a_loop
async def test_a_router_that_stops_says_so_to_each_request():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = stream(place, iter([streamed(id="a"), streamed(id="b")]))
        await replica.until(lambda: len(replica.running) == 2)
        stopping = asyncio.create_task(place.router.stop(grace_s=0.01))
        found = await by_id(call)
        assert {name: answers[-1].error_message for name, answers in found.items()} == dict.fromkeys(
            "ab", "this router is stopping"
        )
        await stopping


async def end_of(call) -> str:
    """The error that ends a stream with a deadline: of the call, or of its last answer if the router was first."""
    try:
        answers = [answer async for answer in call]
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return answers[-1].infer_response.parameters["error_code"].string_param


@on_a_loop
async def test_a_deadline_ends_the_stream():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = stream(place, iter([streamed()]), timeout=0.2)
        assert await end_of(call) == "DEADLINE_EXCEEDED"
        await replica.until(lambda: len(replica.aborted) == len(replica.submits))  # it may never have begun
        replica.resume()
