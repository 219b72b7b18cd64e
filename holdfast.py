"""Holdfast: LLM serving whose streams hold. The public names; each is imported when it is first used.

from holdfast import LLM, SamplingParams

with LLM("demo") as llm:
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.app import build_app
    from cluster.beams import BeamSearchParams
    from cluster.blocking_client import Client
    from cluster.client import AsyncClient
    from cluster.generation import Chunk
    from cluster.inference_engine import InferenceEngine
    from cluster.llm import LLM
    from cluster.outputs import CompletionOutput, RequestOutput
    from worker.errors import HoldfastError
    from worker.request import FinishReason, Priority
    from worker.sampling_params import SamplingParams
    from worker.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "AsyncClient",
    "BeamSearchParams",
    "Chunk",
    "Client",
    "CompletionOutput",
    "FinishReason",
    "HoldfastError",
    "InferenceEngine",
    "Priority",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "build_app",
]

_HOMES = {
    "AsyncClient": "cluster.client",
    "Chunk": "cluster.generation",
    "Client": "cluster.blocking_client",
    "LLM": "cluster.llm",
    "BeamSearchParams": "cluster.beams",
    "CompletionOutput": "cluster.outputs",
    "FinishReason": "worker.request",
    "HoldfastError": "worker.errors",
    "InferenceEngine": "cluster.inference_engine",
    "Priority": "worker.request",
    "RequestOutput": "cluster.outputs",
    "SamplingParams": "worker.sampling_params",
    "StructuredOutputs": "worker.structured_outputs",
    "build_app": "cluster.app",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
