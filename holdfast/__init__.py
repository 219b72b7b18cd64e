"""Holdfast: LLM serving whose streams hold. The public names; each is imported when it is first used.

from holdfast import LLM, SamplingParams

with LLM("demo") as llm:
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

import importlib
from typing import TYPE_CHECKING

from holdfast.worker.process_memory import importing

if TYPE_CHECKING:
    from holdfast.cluster.client.async_client import AsyncClient
    from holdfast.cluster.client.blocking_client import Client
    from holdfast.cluster.client.holding_transport import HoldingTransport
    from holdfast.cluster.client.transport import SERVICE_CONFIG
    from holdfast.cluster.offline.calls import TextPrompt, TokensPrompt
    from holdfast.cluster.offline.inference_engine import InferenceEngine
    from holdfast.cluster.offline.llm import LLM
    from holdfast.cluster.offline.lora import LoRARequest
    from holdfast.cluster.offline.outputs import BeamSearchParams, CompletionOutput, RequestMetrics, RequestOutput
    from holdfast.cluster.offline.vllm_engines import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine
    from holdfast.cluster.serve.app import build_app, build_model
    from holdfast.router.generation import OutputDelta
    from holdfast.worker.errors import HoldfastError
    from holdfast.worker.pooling import PoolingParams
    from holdfast.worker.request import FinishReason, Priority
    from holdfast.worker.sampling_params import SamplingParams
    from holdfast.worker.structured_outputs import StructuredOutputs
    from holdfast.worker.value_types import RequestOutputKind
    from holdfast.worker.wire.tls import Tls

    GuidedDecodingParams = StructuredOutputsParams = StructuredOutputs

__all__ = [
    "LLM",
    "SERVICE_CONFIG",
    "AsyncClient",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "Client",
    "CompletionOutput",
    "EngineArgs",
    "FinishReason",
    "GuidedDecodingParams",
    "HoldfastError",
    "HoldingTransport",
    "InferenceEngine",
    "LLMEngine",
    "LoRARequest",
    "OutputDelta",
    "PoolingParams",
    "Priority",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "Tls",
    "TokensPrompt",
    "__version__",
    "build_app",
    "build_model",
]

HOMES = {  # the module of each name
    "SERVICE_CONFIG": "holdfast.cluster.client.transport",
    "AsyncClient": "holdfast.cluster.client.async_client",
    "AsyncEngineArgs": "holdfast.cluster.offline.vllm_engines",
    "AsyncLLMEngine": "holdfast.cluster.offline.vllm_engines",
    "LLMEngine": "holdfast.cluster.offline.vllm_engines",
    "OutputDelta": "holdfast.router.generation",
    "Client": "holdfast.cluster.client.blocking_client",
    "LLM": "holdfast.cluster.offline.llm",
    "LoRARequest": "holdfast.cluster.offline.lora",
    "BeamSearchParams": "holdfast.cluster.offline.outputs",
    "CompletionOutput": "holdfast.cluster.offline.outputs",
    "EngineArgs": "holdfast.cluster.offline.vllm_engines",
    "FinishReason": "holdfast.worker.request",
    "HoldfastError": "holdfast.worker.errors",
    "HoldingTransport": "holdfast.cluster.client.holding_transport",
    "InferenceEngine": "holdfast.cluster.offline.inference_engine",
    "PoolingParams": "holdfast.worker.pooling",
    "Priority": "holdfast.worker.request",
    "RequestMetrics": "holdfast.cluster.offline.outputs",
    "RequestOutput": "holdfast.cluster.offline.outputs",
    "RequestOutputKind": "holdfast.worker.value_types",
    "SamplingParams": "holdfast.worker.sampling_params",
    "StructuredOutputs": "holdfast.worker.structured_outputs",
    "Tls": "holdfast.worker.wire.tls",
    "TextPrompt": "holdfast.cluster.offline.calls",
    "TokensPrompt": "holdfast.cluster.offline.calls",
    "build_app": "holdfast.cluster.serve.app",
    "build_model": "holdfast.cluster.serve.app",
}


NAMES_IN_VLLM = {"GuidedDecodingParams": "StructuredOutputs", "StructuredOutputsParams": "StructuredOutputs"}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("holdfast")
    name = NAMES_IN_VLLM.get(name, name)
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
