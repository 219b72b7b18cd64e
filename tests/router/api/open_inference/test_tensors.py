"""The two forms of tensors, against each other and against bytes that are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.foreign import grpc_service_pb2 as pb
from holdfast.router.api.open_inference.tensors import BOOL, BYTES, FP32, UINT32, Tensor, add_outputs, input_values
from holdfast.worker.errors import InvalidRequestError
from tests.router.api.open_inference.messages import values

VALUES = {
    "BYTES": (BYTES, st.binary(max_size=40)),
    "BOOL": (BOOL, st.booleans()),
    "UINT32": (UINT32, st.integers(0, 2**32 - 1)),
    "FP32": (FP32, st.floats(width=32, allow_nan=False)),
}
ROWS = st.sampled_from(sorted(VALUES)).flatmap(
    lambda name: st.tuples(st.just(VALUES[name][0]), st.lists(VALUES[name][1], min_size=1, max_size=8))
)


@given(st.lists(ROWS, max_size=5), st.booleans())
def test_what_is_written_in_a_form_is_read_from_it(rows, are_raw):
    tensors = [Tensor(name=f"t{index}", datatype=row[0], values=row[1]) for index, row in enumerate(rows)]
    answer = pb.ModelInferResponse()
    add_outputs(answer, tensors, are_raw=are_raw)
    asked = pb.ModelInferRequest(raw_input_contents=answer.raw_output_contents)
    for output in answer.outputs:
        asked.inputs.add().MergeFrom(pb.ModelInferRequest.InferInputTensor.FromString(output.SerializeToString()))
    datatypes = {tensor.name: tensor.datatype for tensor in tensors}
    assert input_values(asked, datatypes) == {tensor.name: tuple(tensor.values) for tensor in tensors}
    if not any(tensor.datatype is BOOL for tensor in tensors):
        assert values(answer) == {tensor.name: list(tensor.values) for tensor in tensors}


@given(st.binary(max_size=60), st.sampled_from([BYTES, BOOL, UINT32, FP32]), st.lists(st.integers(), max_size=3))
def test_any_bytes_are_elements_or_are_refused(raw, datatype, shape):
    bounded = [size % 2**63 for size in shape]
    asked = pb.ModelInferRequest(raw_input_contents=[raw])
    asked.inputs.add(name="t", datatype=datatype.name, shape=bounded)
    found, field = (), "t."
    try:
        (found,) = input_values(asked, {"t": datatype}).values()
    except InvalidRequestError as error:
        field = error.field
    assert field.startswith("t.")
    assert len(found) <= len(raw)


def test_a_length_beyond_the_bytes_is_refused_without_reading_it():
    asked = pb.ModelInferRequest(raw_input_contents=[b"\xff\xff\xff\xff"])
    asked.inputs.add(name="t", datatype="BYTES", shape=[1])
    with pytest.raises(InvalidRequestError, match="in the middle"):
        input_values(asked, {"t": BYTES})
