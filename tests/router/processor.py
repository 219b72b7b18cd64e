"""A request processor with one replica that keeps what it is sent; no network."""

import asyncio

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.worker.request import EngineRequest
from tests.fakes import byte_tokenizer
from tests.router.core import NO_LOAD, facts


class Port:
    """Keeps what a replica would be asked."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []

    def submit(self, action) -> None:
        self.requests.append(action.request)

    def abort(self, action) -> None:
        pass

    def take_pins(self, action) -> None: ...


async def processor_and_port(tokenizers: TokenizerRegistry | None = None, **changes) -> tuple[RequestProcessor, Port]:
    """A request processor with one replica that is up; by default the tokenizer is one of bytes."""
    tokenizers = tokenizers or TokenizerRegistry(byte_tokenizer, inline_bytes=100)
    await tokenizers.load("m", "/nowhere")
    dispatch = Dispatch(RouterConfig(), LimitsConfig(), lambda n: 0)
    dispatch_host, port = DispatchHost(dispatch, asyncio.get_running_loop(), lambda: None), Port()
    dispatch_host.replica_up(port, facts("r", "m", **({"vocab_size": 256, "num_blocks": 1000} | changes)), NO_LOAD)
    return RequestProcessor(dispatch_host, tokenizers, LimitsConfig()), port
