"""Pipeline of requests, composed here for every host: dispatcher core, dispatch host, tokenizers, request processor."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.policy import RandomIndex
from holdfast.router.overload.overload import Overload
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.gate import Gate
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.worker.config import ServiceOrderConfig

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Request pipeline of one router, on one event loop. Replicas are connected to `dispatch_host`, clients call
    `processor`.
    """

    dispatch_host: DispatchHost
    tokenizers: TokenizerRegistry
    processor: RequestProcessor

    @classmethod
    def build(
        cls,
        config: RouterConfig,
        limits: LimitsConfig,
        load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
        on_models_changed: Callable[[], None] = lambda: None,
        *,
        order: ServiceOrderConfig | None = None,
        gate: Gate | None = None,
        tracer: "Tracer | None" = None,
        overload: Overload | None = None,
        random_index: RandomIndex | None = None,
        suspends_unread: bool = False,
    ) -> Self:
        """On the running event loop. Optional parts are as in `Dispatch` (`order`) and `RequestProcessor`.

        With `suspends_unread`, `limits.max_unread_tokens` holds for clients that do not read.
        """
        dispatch = Dispatch(config, limits, random_index or random.Random().randrange, order=order)
        max_unread_tokens = limits.max_unread_tokens if suspends_unread else None
        host = DispatchHost(dispatch, asyncio.get_running_loop(), on_models_changed, max_unread_tokens)
        tokenizers = TokenizerRegistry(load_tokenizer, config.inline_tokenize_bytes)
        return cls(host, tokenizers, RequestProcessor(host, tokenizers, limits, gate, tracer, overload))
