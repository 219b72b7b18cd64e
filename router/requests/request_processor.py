"""Request processor: opens clients' requests on the dispatch host, and serves tokenization. And the pipeline around it,
which a served router, offline inference and a replica with vLLM's protocol share.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from holdfast.router.chat import Chat
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.policy import RandomIndex
from holdfast.router.dispatch.request_state import RequestState, siblings
from holdfast.router.events import ModelStatus
from holdfast.router.generation import OutputDelta
from holdfast.router.overload.byte_ledger import CURRENT_LEASE
from holdfast.router.overload.overload import Overload
from holdfast.router.request import GenerationRequest, check_text, naming
from holdfast.router.requests.answer import OpenAnswers, SampledAnswer
from holdfast.router.requests.beam_search import BeamAnswer
from holdfast.router.requests.poison_watch import CURRENT_READING
from holdfast.router.requests.request_admission import Adapters, Pauses, RequestAdmission, ServedAdapter
from holdfast.router.requests.request_stats import AdmittedRequest, RequestStats
from holdfast.router.requests.session_book import SessionBook
from holdfast.router.requests.tracing import RequestTracer
from holdfast.router.resume import ResumeRecord, received_delta
from holdfast.router.security.gate import Gate
from holdfast.router.text.head_lines import tidied
from holdfast.router.text.prompt import check_vocabulary
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.router.tools.chat_style import ChatStyle
from holdfast.worker.adapter import Adapter
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import (
    DeadlineExceededError,
    InvalidRequestError,
)
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


P = ParamSpec("P")
T = TypeVar("T")


class RequestProcessor:
    """Validates and tokenizes requests, and opens them on the dispatch host. Every protocol front end uses it."""

    def __init__(
        self,
        dispatch_host: DispatchHost,
        tokenizers: TokenizerRegistry,
        limits: LimitsConfig,
        gate: Gate | None = None,
        tracer: "Tracer | None" = None,
        overload: Overload | None = None,
        head_line_rules: Collection[str] = (),
    ) -> None:
        """Without a `gate` every request is permitted; without a `tracer` there are no traces; without an `overload`
        manager no request is shed.
        """
        self._dispatch_host = dispatch_host
        self._gate = gate or Gate()
        self._tokenizers = tokenizers
        self._limits = limits
        self._chat_styles: dict[str, tuple[Tokenizer, dict[str | None, ChatStyle]]] = {}
        """Tokenizer of each model, and the style of each of its chat templates that was used."""
        self._open_answers = OpenAnswers()
        self._head_line_rules = head_line_rules
        self.stats = RequestStats()
        self.sessions = SessionBook()
        """Sessions of its requests, where a router notes them (`stats.on_end`)."""
        self._admission = RequestAdmission(
            dispatch_host, tokenizers, limits, self._gate, self._open_answers, self.stats, overload, head_line_rules
        )
        self._tracer = None if tracer is None else RequestTracer(tracer, dispatch_host.now)

    @property
    def is_closed(self) -> bool:
        """New requests are refused."""
        return self._admission.is_closed

    def close(self) -> None:
        """Refuses new requests from now on; open ones continue."""
        self._admission.is_closed = True

    def check_overload(self, priority: Priority = Priority.NORMAL, *, is_resumed: bool = False) -> None:
        """Like `RequestAdmission.check_overload`, before a request is known, or for a call without one."""
        self._admission.check_overload(priority, is_resumed=is_resumed)

    def charge(self, request: GenerationRequest) -> None:
        """Checks the caller's rights and charges its request rate, for a request that runs later."""
        self._gate.caller().charged(request, self._dispatch_host.now())

    @property
    def key_name(self) -> str:
        """Name of the caller's key; empty where no keys are required."""
        return self._gate.caller().name

    @property
    def pauses(self) -> Pauses:
        """Which models take no new requests for now."""
        return self._admission.pauses

    @property
    def adapters(self) -> Adapters:
        """Adapters, by the names that requests give as their model."""
        return self._admission.adapters

    async def try_adapter(self, model: str, adapter: Adapter) -> None:
        """Has a replica load an adapter and compute a token, or a vector, with it. Raises `InvalidRequestError` if it
        is refused.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0)
        pooling = None if self.model(model).facts.pooling is None else PoolingParams()
        request = GenerationRequest(prompt=(0,), model=adapter.key, sampling_params=params, pooling=pooling)
        self.adapters.exact[adapter.key] = ServedAdapter(model, adapter)
        try:
            async with self.open(request) as answer:
                await answer.outputs(None)
        finally:
            self.adapters.exact.pop(adapter.key, None)

    def models(self) -> tuple[ModelStatus, ...]:
        """Models that the caller may use."""
        return self._admission.models()

    def model(self, name: str) -> ModelStatus:
        """Same as `RequestAdmission.model`."""
        return self._admission.model(name)

    @asynccontextmanager
    async def open(
        self, request: GenerationRequest, time_remaining_s: float | None = None
    ) -> AsyncIterator[SampledAnswer]:
        """Opens a request and yields its response. Leaving the context cancels open sequences.

        `time_remaining_s` is the time until the call's own deadline; the earliest limit holds. Raises `HoldfastError`,
        in the words of the request's client.
        """
        with naming(request.names):
            admitted = await self._admit(request, time_remaining_s)
            answer = SampledAnswer(admitted)
            async with self._serving(admitted, answer):
                await self._begin(request, answer)
                yield answer

    async def _admit(self, request: GenerationRequest, time_remaining_s: float | None) -> AdmittedRequest:
        try:
            admitted = await self._admission.admit(request, time_remaining_s)
        except BaseException as error:
            self.stats.refused(error)
            raise
        if self._tracer is not None:
            admitted.on_end = trace = self._tracer.begin(admitted.request.request_id, admitted.model)
            if trace is not None:  # it is sampled: its replicas get the context of its trace
                admitted.request = replace(admitted.request, traceparent=trace.traceparent)
        return admitted

    @asynccontextmanager
    async def _serving(self, admitted: AdmittedRequest, answer: SampledAnswer | BeamAnswer) -> AsyncIterator[None]:
        """Covers a request from admission to its end: open sequences are cancelled, the caller is charged for the
        output, and the statistics are kept. Ends the task of a reader that does not even take the error of its
        deadline.
        """
        time_left_s = admitted.deadline - self._dispatch_host.now() + self._limits.slow_reader_s
        cause: BaseException | None = None
        try:
            async with asyncio.timeout(None if time_left_s == math.inf else time_left_s) as reading:
                yield
        except BaseException as error:
            cause = error
            if isinstance(error, TimeoutError) and reading.expired():
                cause = DeadlineExceededError("the answer was not read (limits.slow_reader_s)")
                raise cause from None
            raise
        finally:
            if admitted.is_open:
                self._open_answers.drop(answer, admitted.request.key)
            admitted.is_over = answer.is_over
            if isinstance(answer, SampledAnswer):
                admitted.note_read(answer.streams)
                if admitted.lease is not None:
                    admitted.lease.endings.remove(answer)
                answer.close()
            else:
                admitted.num_tokens, admitted.timelines = answer.num_tokens, answer.timelines
            admitted.end(cause)
            cause = None  # its traceback has this frame

    async def _begin(self, request: GenerationRequest, answer: SampledAnswer) -> None:
        """Opens all sequences of a request."""
        admitted, admission = answer.admitted, self._admission
        sequences: list[RequestState] = []
        has_siblings = admitted.request.sampling_params.num_sequences > 1
        for one in siblings(admitted.request) if has_siblings else (admitted.request,):
            sequences.append(await admission.sequence(admitted, one, request.resume))
        if request.resume is not None:  # its output was read on another thread
            admission.check_open()
        if self._limits.max_open_per_tenant is not None:  # once more: others may have come meanwhile
            admission.check_tenant(admitted.request.tenant)
        answer.open(self._dispatch_host, sequences, answer, echo=admitted.echo, watch=admitted.note)
        answer.sequences = sequences
        if request.resume is not None:
            answer.received = _received(sequences, request.resume, admitted.echo)
        if (lease := CURRENT_LEASE.get()) is not None:  # from here on it holds unread output
            lease.endings.append(answer)
            admitted.lease = lease
        self._note_open(admitted, answer)

    def _note_open(self, admitted: AdmittedRequest, answer: SampledAnswer | BeamAnswer) -> None:
        self._open_answers.add(answer, admitted.request.key)
        admitted.is_open = True
        if (reading := CURRENT_READING.get()) is not None:
            reading.admitted()

    @asynccontextmanager
    async def search(
        self, request: GenerationRequest, time_remaining_s: float | None = None
    ) -> AsyncIterator[BeamAnswer]:
        """Like `open`, for a request with a `beam_width`. The search begins with `whole`."""
        with naming(request.names):
            admitted = await self._admit(request, time_remaining_s)
            self._admission.check_tenant(admitted.request.tenant)
            answer = BeamAnswer(admitted, self._dispatch_host, self._tokenizers[admitted.model])
            async with self._serving(admitted, answer):
                self._note_open(admitted, answer)
                yield answer

    def abort(self, request_id: str) -> bool:
        """Aborts a request of any client; its output so far stays. Returns whether it was open. A caller with a key can
        only abort requests of its tenant.
        """
        if not request_id:
            raise InvalidRequestError("request_id", request_id, "must be set")
        return self._open_answers.abort(request_id, self._gate.caller().tenant)

    async def beginning(self, model: str, text: str, num_tokens: int) -> str:
        """The beginning of a text that has this many tokens at most, for a model."""
        check_text(text, self._limits)
        return await self._tokenizers.beginning(self.model(model).name, text, num_tokens)

    async def tokenize(self, model: str, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a text prompt. Raises `HoldfastError`."""
        self.check_overload()
        check_text(text, self._limits)
        return await self._tokenizers.encode(self.model(model).name, text, add_special_tokens)

    async def tokenize_chat(self, model: str, chat: Chat, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """The token ids of a chat's prompt. Raises `HoldfastError`."""
        self.check_overload()
        await self._tokenizers.check(chat, chat.check, self._limits)
        chat, _ = tidied(chat, self._head_line_rules)
        text = await self._tokenizers.render(self.model(model).name, chat)
        check_text(text, self._limits, "chat")
        return await self._tokenizers.encode(self.model(model).name, text, add_special_tokens)

    async def apart(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Same as `TokenizerRegistry.apart`."""
        return await self._tokenizers.apart(function, *arguments, **named)

    async def render(self, model: str, chat: Chat) -> str:
        """The text of a chat's prompt. Raises `HoldfastError`."""
        self.check_overload()
        await self._tokenizers.check(chat, chat.check, self._limits)
        chat, _ = tidied(chat, self._head_line_rules)
        return await self._tokenizers.render(self.model(model).name, chat)

    async def check_structure(self, model: str, structure: StructuredOutputs) -> None:
        """Raises `InvalidRequestError` for a shape that cannot be enforced."""
        structure_chars, limit = structure.num_chars, self._limits.max_grammar_length
        if structure_chars > limit:
            message = f"must have at most {limit} characters (limits.max_grammar_length), not {structure_chars}"
            raise InvalidRequestError("structured_outputs", structure.text[:100], message)
        await self._tokenizers.grammar(self.model(model).name, structure)

    def chat_style(self, model: str, *, has_tools: bool = False, template: str = "") -> ChatStyle:
        """Formats in which a served model writes calls and reasoning, by the chat template for chats with or without
        tools, or the one named. Raises `HoldfastError`.
        """
        name = self.model(model).name
        tokenizer = self._tokenizers[name]
        used = tokenizer.template_of(has_tools=has_tools, name=template)
        known, styles = self._chat_styles.get(name, (None, {}))
        if known is not tokenizer:
            self._chat_styles[name] = tokenizer, (styles := {})
        if used not in styles:
            styles[used] = ChatStyle.of(tokenizer, used)
        return styles[used]

    def has_chat_template(self, model: str) -> bool:
        """Whether a model that is served here takes chats."""
        return bool(self._tokenizers[model].chat_templates)

    def tokenizer(self, model: str) -> Tokenizer:
        """Tokenizer of a served model, or of the base of an adapter."""
        if model not in self._dispatch_host.dispatch.registry.statuses and (served := self.adapters.find(model)):
            model = served.model
        return self._tokenizers[model]

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises `HoldfastError`."""
        self.check_overload()
        status = self.model(model)
        if len(token_ids) > status.facts.max_model_len:
            limit = f"must be at most {status.facts.max_model_len} token ids, the model's maximum context length"
            raise InvalidRequestError("token_ids", tuple(token_ids[:10]), limit)
        check_vocabulary("token_ids", token_ids, status.facts.vocab_size)
        return await self._tokenizers.decode(status.name, tuple(token_ids))


def _received(sequences: Sequence[RequestState], resume: ResumeRecord, echo: str) -> list[OutputDelta]:
    """Output that the client of a resumed request has, for each sequence of which it has any."""
    has_some = sequences[: len(resume.sequences)]
    received = (received_delta(one.request, one.caught_up, resume, echo) for one in has_some)
    return [one for one in received if one is not None]


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
        processor = RequestProcessor(host, tokenizers, limits, gate, tracer, overload, config.head_line_rules)
        return cls(host, tokenizers, processor)
