"""ModelInfer over real gRPC, with fake replicas behind the router: answers, forms, parameters, refusals."""

import asyncio

import pytest

from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.router.api.open_inference.messages import infer, raw_bytes, unary, values
from tests.router.site import expected, refusal, site


@on_each_loop
async def test_the_text_begins_with_the_prompt_unless_it_is_excluded():
    async with site(await FakeReplica.start()) as place:
        call = unary(place, "ModelInfer")
        _, text = expected("hello", 1, 8)
        answer = await call(infer(model_name="fake", id="mine"))
        assert (answer.model_name, answer.model_version, answer.id) == ("fake", "1", "mine")
        assert values(answer) == {"text_output": [f"hello{text}".encode()]}
        excluded = await call(infer(exclude_input_in_output=True))
        assert values(excluded) == {"text_output": [text.encode()]}
        included = await call(infer(exclude_input_in_output=False))
        assert values(included) == values(answer)


@on_each_loop
async def test_it_is_answered_in_the_form_it_was_asked_in():
    async with site(await FakeReplica.start()) as place:
        call, flags = unary(place, "ModelInfer"), {"return_num_input_tokens": True, "return_finish_reason": True}
        raw, typed = [await call(infer(raw=is_raw, **flags)) for is_raw in (True, False)]
        assert raw.raw_output_contents
        assert not typed.raw_output_contents
        assert values(raw) == values(typed)
        assert list(values(raw)) == ["text_output", "finish_reason", "num_input_tokens"]


@on_each_loop
async def test_outputs_come_if_a_flag_asks_for_them_or_if_they_are_named():
    async with site(await FakeReplica.start()) as place:
        call = unary(place, "ModelInfer")
        sampling = {"max_tokens": 3, "seed": 1, "n": "2"}
        flags = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")}
        texts = [f"hello{expected('hello', seed, 3)[1]}".encode() for seed in (1, 2)]
        rest = {"finish_reason": [b"length"] * 2, "num_input_tokens": [5], "num_output_tokens": [3, 3]}
        assert values(await call(infer(sampling=sampling, **flags))) == {"text_output": texts, **rest}
        named = await call(infer(sampling=sampling, outputs=["num_output_tokens"], return_finish_reason=True))
        assert values(named) == {"num_output_tokens": [3, 3]}


@on_each_loop
async def test_sampling_parameters_are_strings_or_values_and_may_be_request_parameters():
    async with site(await FakeReplica.start()) as place:
        call, replica = unary(place, "ModelInfer"), place.replicas[0]
        strings = {
            "temperature": "0.5",
            "top_k": "4",
            "seed": "7",
            "max_tokens": "2",
            "ignore_eos": "true",
            "stop_token_ids": "[3]",
            "logit_bias": '{"5": "1.5"}',
        }
        plain = {"temperature": 0.5, "top_k": 4, "seed": 7, "max_tokens": 2, "ignore_eos": True}
        plain |= {"stop_token_ids": [3], "logit_bias": {"5": 1.5}, "top_p": None}
        named = {"temperature": 0.5, "top_k": 4, "seed": "7", "max_tokens": 2, "ignore_eos": True}
        named |= {"stop_token_ids": "[3]", "logit_bias": '{"5": 1.5}'}
        for request in (infer(sampling=strings), infer(sampling=plain), infer(sampling={}, parameters=named)):
            await call(request)
        first, second, third = (submit.sampling_params for submit in replica.submits)
        assert first == second == third
        assert (first.temperature, first.top_k, first.seed, list(first.stop_token_ids)) == (0.5, 4, 7, [3])
        await call(infer(parameters={"max_tokens": 5, "other": "unknown"}, sampling={"max_tokens": "1"}))
        assert replica.submits[-1].sampling_params.max_tokens == 1, "the tensor has the say"


@on_each_loop
async def test_service_parameters_arrive():
    async with site(await FakeReplica.start()) as place:
        await unary(place, "ModelInfer")(
            infer(parameters={"priority": 1, "timeout": 5_000_000, "tenant": "gold", "cache_salt": "s"})
        )
        (submit,) = place.replicas[0].submits
        assert (submit.priority, submit.tenant, submit.cache_salt) == (0, "gold", "s")
        assert 0 < submit.time_left_ms <= 5000


@on_each_loop
async def test_the_request_id_is_that_of_the_metadata_and_never_the_clients_own_name():
    """Two clients that both begin to count at 1 are no resubmission of one request."""
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        calls = [unary(place, "ModelInfer")(infer(id="1")) for _ in range(2)]
        calls.append(unary(place, "ModelInfer")(infer(id="1"), metadata=(("x-request-id", "mine"),)))
        await replica.until(lambda: len(replica.running) == 3)
        replica.resume()
        assert {answer.id for answer in await asyncio.gather(*calls)} == {"1"}
        first, second, named = [dict(await call.initial_metadata())["x-request-id"] for call in calls]
        assert named == "mine"
        assert len({first, second, "1"}) == 3


@on_each_loop
async def test_a_cancelled_call_is_off_the_replica_at_once():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = unary(place, "ModelInfer")(infer(sampling={"max_tokens": 10**6}))
        await replica.until(lambda: replica.running)
        call.cancel()
        await replica.until(lambda: replica.aborted)


REFUSED = {
    "no text": (lambda: shorn("text_input"), "text_input", "must be set"),
    "two texts": (lambda: doubled(), "text_input.shape", "one element"),
    "text that is not UTF-8": (lambda: infer(text_input=b"\xff"), "text_input", "UTF-8"),
    "empty text": (lambda: infer(""), "text_input", "must not be empty"),
    "a stream": (lambda: infer(stream=True), "stream", "ModelStreamInfer"),
    "an unknown input": (lambda: infer(image=b"x"), "inputs[2].name", "text_input"),
    "an input twice": (lambda: twice(), "inputs[2].name", "twice"),
    "a wrong datatype": (lambda: infer(stream=b"x"), "stream.datatype", "must be BOOL"),
    "a wrong shape": (lambda: reshaped(2), "text_input.shape", "1 BYTES elements"),
    "a negative shape": (lambda: reshaped(-1), "text_input.shape", "1 BYTES elements"),
    "too few raw tensors": (lambda: shortened(), "raw_input_contents", "must have one per input"),
    "a raw tensor that is cut": (lambda: cut(), "text_input.raw_input_contents", "in the middle"),
    "both forms": (lambda: both(), "text_input.contents", "raw_input_contents"),
    "shared memory": (lambda: shared(), "text_input", "shared memory"),
    "an unknown output": (lambda: infer(outputs=["image"]), "outputs[0].name", "text_output"),
    "JSON that is none": (lambda: infer(sampling_parameters=b"{"), "sampling_parameters", "JSON object"),
    "JSON that is no object": (lambda: infer(sampling_parameters=b"[]"), "sampling_parameters", "JSON object"),
    "JSON without an end": (lambda: infer(sampling_parameters=b"[" * 4000), "sampling_parameters", "JSON object"),
    "JSON beyond its bounds": (lambda: infer(sampling_parameters=b"[" * 10**5), "sampling_parameters", "4096 values"),
    "a field beyond its bound": (
        lambda: infer(sampling_parameters=b'{"logit_bias": [%b0' % (b"0," * 5000)),
        "sampling_parameters.logit_bias",
        "4096 values (limits.max_logit_bias)",
    ),
    "text of a field beyond its bound": (
        lambda: infer(sampling={"stop_token_ids": "[" + "0," * 5000}),
        "sampling_parameters.stop_token_ids",
        "4096 values (limits.max_stop_token_ids)",
    ),
    "a request parameter beyond its bound": (
        lambda: infer(sampling={}, parameters={"logit_bias": "[" * 5000}),
        "sampling_parameters.logit_bias",
        "4096 values (limits.max_logit_bias)",
    ),
    "an unknown parameter": (lambda: infer(sampling={"warmth": 1}), "sampling_parameters", "temperature"),
    "temperature -1": (lambda: infer(sampling={"temperature": "-1"}), "sampling_parameters.temperature", "[0, 100]"),
    "temperature nan": (lambda: infer(sampling={"temperature": "nan"}), "sampling_parameters.temperature", "[0, 100]"),
    "temperature x": (lambda: infer(sampling={"temperature": "x"}), "sampling_parameters.temperature", "a number"),
    "max_tokens 1.5": (lambda: infer(sampling={"max_tokens": "1.5"}), "sampling_parameters.max_tokens", "whole"),
    "ignore_eos maybe": (lambda: infer(sampling={"ignore_eos": "maybe"}), "sampling_parameters.ignore_eos", "True"),
    "stop_token_ids x": (lambda: infer(sampling={"stop_token_ids": "x"}), "sampling_parameters.stop_token_ids", "list"),
    "priority 9": (lambda: infer(parameters={"priority": 9}), "priority", "1 (the highest) to 4"),
    "timeout -1": (lambda: infer(parameters={"timeout": -1}), "timeout", "microseconds"),
    "timeout for ever": (lambda: infer(parameters={"timeout": 2**62}), "timeout", "at most 3600 seconds"),
    "a tenant of the wrong type": (lambda: infer(parameters={"tenant": 1}), "tenant", "text"),
}


def shorn(name):
    message = infer()
    index = [tensor.name for tensor in message.inputs].index(name)
    del message.inputs[index], message.raw_input_contents[index]
    return message


def doubled():
    message = infer()
    message.raw_input_contents[0] = raw_bytes(b"a", b"b")
    message.inputs[0].shape[:] = [2]
    return message


def twice():
    message = infer()
    message.inputs.append(message.inputs[0])
    message.raw_input_contents.append(b"")
    return message


def reshaped(size):
    message = infer()
    message.inputs[0].shape[:] = [size]
    return message


def shortened():
    message = infer()
    del message.raw_input_contents[0]
    return message


def cut():
    message = infer()
    message.raw_input_contents[0] = message.raw_input_contents[0][:-1]
    return message


def both():
    message = infer()
    message.inputs[0].contents.bytes_contents.append(b"x")
    return message


def shared():
    message = infer()
    message.inputs[0].parameters["shared_memory_region"].string_param = "x"
    return message


@on_each_loop
async def test_bad_input_is_refused_by_name_and_the_server_goes_on():
    async with site(await FakeReplica.start()) as place:
        call = unary(place, "ModelInfer")
        for name, (message, field, limit) in REFUSED.items():
            refused = await refusal(call(message()))
            assert (refused.code, refused.reason, refused.field) == ("INVALID_ARGUMENT", "INVALID_REQUEST", field), name
            assert limit in refused.message, (name, refused.message)
            assert len(refused.message) < 1200, name
        assert place.replicas[0].submits == []
        assert values(await call(infer()))["text_output"]


@on_a_loop
async def test_unknown_models_versions_and_bytes_are_refused():
    async with site(await FakeReplica.start()) as place:
        call = unary(place, "ModelInfer")
        for fields in ({"model_name": "gpt-9"}, {"model_name": "fake", "model_version": "2"}):
            assert (await refusal(call(infer(**fields)))).code == "NOT_FOUND"
        raw = place.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert (await refusal(raw(b"\xff\xff\xff"))).field == "request"


@pytest.mark.parametrize("shape", [[1, 1], [1]])
@on_a_loop
async def test_a_tensor_of_one_element_may_have_any_number_of_dimensions(shape):
    async with site(await FakeReplica.start()) as place:
        message = infer()
        message.inputs[0].shape[:] = shape
        assert values(await unary(place, "ModelInfer")(message))
