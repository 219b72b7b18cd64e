"""Fields of vLLM's request classes that are not supported: neutral values are taken, others refused by name."""

import pytest

from holdfast.router.api.http.bodies import ChatBody, CompletionBody
from holdfast.router.api.http.messages_body import MessagesBody
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs
from holdfast.worker.value_types import SAMPLING_FIELDS, STRUCTURE_FIELDS


@pytest.mark.parametrize("name", sorted(SAMPLING_FIELDS))
def test_sampling_fields(name):
    for value in SAMPLING_FIELDS[name]:
        params = SamplingParams(**{name: value})
        setattr(params, name, value)
        assert params == SamplingParams()
        assert getattr(params, name) == SAMPLING_FIELDS[name][0]
    for wrong in ("something else", 1 if SAMPLING_FIELDS[name][0] != 1 else 2):
        with pytest.raises(InvalidRequestError, match=rf"^sampling_params\.{name} = "):
            SamplingParams(**{name: wrong})
        with pytest.raises(InvalidRequestError, match=rf"^sampling_params\.{name} = "):
            setattr(params, name, wrong)


@pytest.mark.parametrize("name", sorted(STRUCTURE_FIELDS))
def test_structure_fields(name):
    field = rf"^sampling_params\.structured_outputs\.{name} = "
    for value in STRUCTURE_FIELDS[name]:
        assert StructuredOutputs(regex="a", **{name: value}) == StructuredOutputs(regex="a")
        assert StructuredOutputs.of({"regex": "a", name: value}) == StructuredOutputs(regex="a")
    with pytest.raises(InvalidRequestError, match=field):
        StructuredOutputs(regex="a", **{name: "something else"})
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(structured_outputs={"regex": "a", name: "something else"})


def test_bodies_know_the_same_fields_by_the_same_table():
    for kind in (CompletionBody, ChatBody, MessagesBody, ResponsesBody):
        assert kind.neutral.items() >= SAMPLING_FIELDS.items()


def test_no_json_object_by_none():
    assert StructuredOutputs(regex="a", json_object=None) == StructuredOutputs(regex="a")


def test_a_misspelt_field_is_a_type_error():
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1)
