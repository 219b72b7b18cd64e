"""Server and model metadata of the Open Inference Protocol: what is served, and the tensors of a request and an answer.

What may not live here: the tensors' meaning (`infer_request.py`), counts (`statistics.py`).
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from holdfast.foreign import grpc_service_pb2, model_config_pb2
from holdfast.router.doors.oip.infer_request import INPUTS, OUTPUTS, TEXT_INPUT, VERSION
from holdfast.router.events import ModelStatus

PLATFORM: Final = "holdfast"
EXTENSIONS: Final = ("model_configuration", "parameters", "schedule_policy", "statistics")

_DATA_TYPES: Final = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL", "UINT32": "TYPE_UINT32", "FP32": "TYPE_FP32"}
_LENGTHS: Final = {"num_input_tokens": 1}
"""Of outputs that have not one element for each completion."""


def server_metadata() -> grpc_service_pb2.ServerMetadataResponse:
    return grpc_service_pb2.ServerMetadataResponse(name=PLATFORM, version=_version(), extensions=EXTENSIONS)


def model_metadata(model: ModelStatus) -> grpc_service_pb2.ModelMetadataResponse:
    tensor = grpc_service_pb2.ModelMetadataResponse.TensorMetadata
    return grpc_service_pb2.ModelMetadataResponse(
        name=model.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor(name=name, datatype=datatype.name, shape=[1]) for name, datatype in INPUTS.items()],
        outputs=[
            tensor(name=name, datatype=datatype.name, shape=[_LENGTHS.get(name, -1)])
            for name, datatype in OUTPUTS.items()
        ],
    )


def model_config(model: ModelStatus) -> model_config_pb2.ModelConfig:
    facts = model.facts
    said = {"max_model_len": facts.max_model_len, "vocab_size": facts.vocab_size, "fingerprint": facts.fingerprint}
    return model_config_pb2.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=0,
        input=[
            model_config_pb2.ModelInput(
                name=name, data_type=_DATA_TYPES[datatype.name], dims=[1], optional=name != TEXT_INPUT
            )
            for name, datatype in INPUTS.items()
        ],
        output=[
            model_config_pb2.ModelOutput(name=name, data_type=_DATA_TYPES[datatype.name], dims=[_LENGTHS.get(name, -1)])
            for name, datatype in OUTPUTS.items()
        ],
        parameters={name: model_config_pb2.ModelParameter(string_value=str(value)) for name, value in said.items()},
        model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=True),
    )


def _version() -> str:
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "unknown"
