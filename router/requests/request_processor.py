"""Request processor: opens clients' requests on the dispatch host, and answers what they ask about text."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from holdfast.router.chat import Chat
from holdfast.router.config import LimitsConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.parallel_sampling import siblings
from holdfast.router.dispatch.request_stream import RequestStream, open_request_stream
from holdfast.router.events import ModelStatus, OutputDelta
from holdfast.router.overload.byte_ledger import current_lease
from holdfast.router.overload.overload import Overload
from holdfast.router.request import GenerationRequest, check_text, naming
from holdfast.router.requests.answer import AnswerSink, OpenAnswers, SampledAnswer
from holdfast.router.requests.beam_search import BeamAnswer, BeamSearch
from holdfast.router.requests.poison_watch import current_reading
from holdfast.router.requests.request_admission import AdmittedRequest, Pauses, RequestAdmission
from holdfast.router.requests.request_stats import RequestStats, RequestWatch
from holdfast.router.requests.tracing import RequestTracer
from holdfast.router.resume import NewSequence, received_delivery
from holdfast.router.resume_record import ResumeRecord
from holdfast.router.security.gate import Gate
from holdfast.router.text.prompt import check_vocabulary
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.router.tools.chat_style import ChatStyle
from holdfast.worker.errors import (
    DeadlineExceededError,
    InvalidRequestError,
)
from holdfast.worker.request import Priority
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
    ) -> None:
        """Without a `gate` everyone may ask for everything; without a `tracer` nothing is traced; without an `overload`
        manager nothing is shed.
        """
        self._dispatch_host = dispatch_host
        self._gate = gate or Gate()
        self._tokenizers = tokenizers
        self._limits = limits
        self._chat_styles: dict[str, tuple[Tokenizer, dict[str | None, ChatStyle]]] = {}
        """By model: its tokenizer, and the style of each of its chat templates that was asked for."""
        self._open_answers = OpenAnswers()
        self._admission = RequestAdmission(dispatch_host, tokenizers, limits, self._gate, self._open_answers, overload)
        self.stats = RequestStats()
        self._tracer = None if tracer is None else RequestTracer(tracer, dispatch_host.now)

    @property
    def is_closed(self) -> bool:
        """New requests are refused."""
        return self._admission.is_closed

    def close(self) -> None:
        """From here on new requests are refused; open ones go on."""
        self._admission.is_closed = True

    def check_overload(self, priority: Priority = Priority.NORMAL, *, is_resumed: bool = False) -> None:
        """As `RequestAdmission.check_overload`, for what is asked before a request is known, or is none."""
        self._admission.check_overload(priority, is_resumed=is_resumed)

    @property
    def pauses(self) -> Pauses:
        """Which models take no new requests for now."""
        return self._admission.pauses

    def models(self) -> tuple[ModelStatus, ...]:
        """Those that the caller may use."""
        return self._admission.models()

    def model(self, name: str) -> ModelStatus:
        """As `RequestAdmission.model`."""
        return self._admission.model(name)

    @asynccontextmanager
    async def open(
        self, request: GenerationRequest, time_remaining_s: float | None = None
    ) -> AsyncIterator[SampledAnswer]:
        """Opens a request and yields its response. Leaving the context cancels what has not ended.

        `time_remaining_s` is the time until the call's own deadline; the earliest limit holds. Raises `HoldfastError`,
        in the words of the request's client.
        """
        with naming(request.names):
            admitted, watch = await self._admit(request, time_remaining_s)
            async with self._accounted(admitted, watch):
                answer, call = await self._begin(request, admitted, watch)
                lease = current_lease()
                if lease is not None:  # its input is decoded; what the lease holds from here on is unread output
                    lease.give_back()
                    lease.endings.append(call)
                with closing(call), self._open_answers.holding(answer, admitted.engine_request.key):
                    try:
                        yield answer
                    finally:
                        watch.is_over = call.is_over
                        watch.note_read(call.streams)
                        if lease is not None:
                            lease.endings.remove(call)

    async def _admit(
        self, request: GenerationRequest, time_remaining_s: float | None
    ) -> tuple[AdmittedRequest, RequestWatch]:
        try:
            admitted = await self._admission.admit(request, time_remaining_s)
        except BaseException as error:
            self.stats.refused(error)
            raise
        now = self._dispatch_host.now
        watch = RequestWatch(self.stats, admitted.engine_request, admitted.model.name, now, now())
        return (admitted if self._tracer is None else self._traced(self._tracer, admitted, watch)), watch

    @asynccontextmanager
    async def _accounted(self, admitted: AdmittedRequest, watch: RequestWatch) -> AsyncIterator[None]:
        """From admission to the end, in whichever way it ends: the caller is charged for the output, and the figures
        are kept. Ends the task of a reader that does not even take the error of its deadline.
        """
        time_left_s = admitted.deadline - self._dispatch_host.now() + self._limits.slow_reader_s
        cause: BaseException | None = None
        try:
            async with asyncio.timeout(time_left_s) as reading:
                yield
        except BaseException as error:
            cause = error
            if isinstance(error, TimeoutError) and reading.expired():
                cause = DeadlineExceededError("the answer was not read (limits.slow_reader_s)")
                raise cause from None
            raise
        finally:
            admitted.caller.took_tokens(watch.num_tokens, self._dispatch_host.now())
            watch.end(cause)

    async def _begin(
        self, request: GenerationRequest, admitted: AdmittedRequest, watch: RequestWatch
    ) -> tuple[SampledAnswer, RequestStream]:
        """Opens all sequences of a request."""
        engine_request, model = admitted.engine_request, admitted.model.name
        sequences: list[NewSequence] = []
        for index, one in enumerate(siblings(engine_request)):
            sequences.append(await self._admission.new_sequence(one, index, request.resume, admitted))
        self._admission.check_open()
        # Once more: others may have come meanwhile.
        self._admission.check_tenant(engine_request.tenant)
        sink = AnswerSink()
        call = open_request_stream(
            self._dispatch_host,
            engine_request.request_id,
            sequences,
            model=model,
            deadline=admitted.deadline,
            sink=sink,
            client_attempt=admitted.attempt,
            echo=admitted.echo,
            watch=watch.note,
        )
        answer = SampledAnswer(
            call,
            sink,
            model,
            engine_request.sampling_params,
            engine_request.prompt_token_ids,
            received=() if request.resume is None else _received(sequences, request.resume, admitted.echo),
            watch=watch,
            texts=[sequence.text for sequence in sequences],
            echo=admitted.echo,
        )
        if (reading := current_reading()) is not None:
            reading.admitted()
        return answer, call

    @asynccontextmanager
    async def search(
        self, request: GenerationRequest, time_remaining_s: float | None = None
    ) -> AsyncIterator[BeamAnswer]:
        """As `open`, for a request with a `beam_width`. The search begins with `whole`."""
        with naming(request.names):
            admitted, watch = await self._admit(request, time_remaining_s)
            self._admission.check_tenant(admitted.engine_request.tenant)
            answer = self._beam_answer(admitted, watch)
            if (reading := current_reading()) is not None:
                reading.admitted()
            async with self._accounted(admitted, watch):
                with self._open_answers.holding(answer, admitted.engine_request.key):
                    try:
                        yield answer
                    finally:
                        watch.is_over = answer.is_over
                        watch.num_tokens, watch.timelines = answer.num_tokens, answer.timelines

    def _beam_answer(self, admitted: AdmittedRequest, watch: RequestWatch) -> BeamAnswer:
        engine_request, model = admitted.engine_request, admitted.model
        search = BeamSearch.of(
            engine_request.sampling_params,
            len(engine_request.prompt_token_ids),
            model.facts.max_sequence_len,
            model.facts.eos_token_ids,
        )
        return BeamAnswer(
            engine_request,
            search,
            self._dispatch_host,
            model=model.name,
            tokenizer=self._tokenizers[model.name],
            deadline=admitted.deadline,
            echo=admitted.echo,
            client_attempt=admitted.attempt,
            watch=watch.note,
        )

    def _traced(self, tracer: RequestTracer, admitted: AdmittedRequest, watch: RequestWatch) -> AdmittedRequest:
        """The request as its replicas get it, with the context of its trace, if it is sampled."""
        watch.on_end = trace = tracer.begin(admitted.engine_request.request_id, admitted.model.name)
        if trace is None:
            return admitted
        return replace(admitted, engine_request=replace(admitted.engine_request, traceparent=trace.traceparent))

    def abort(self, request_id: str) -> bool:
        """Ends a request, whoever has sent it, after the output that it has. Returns whether it was open.

        A caller with a key ends those of its own tenant alone.
        """
        if not request_id:
            raise InvalidRequestError("request_id", request_id, "must be set")
        return self._open_answers.abort(request_id, self._gate.caller().tenant)

    async def tokenize(self, model: str, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a text prompt. Raises `HoldfastError`."""
        self.check_overload()
        check_text(text, self._limits)
        return await self._tokenizers.encode(self.model(model).name, text, add_special_tokens)

    async def tokenize_chat(self, model: str, chat: Chat, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """The token ids of a chat's prompt. Raises `HoldfastError`."""
        self.check_overload()
        await self._tokenizers.check(chat, chat.check, self._limits)
        text = await self._tokenizers.render(self.model(model).name, chat)
        check_text(text, self._limits, "chat")
        return await self._tokenizers.encode(self.model(model).name, text, add_special_tokens)

    async def apart(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """As `TokenizerRegistry.apart`."""
        return await self._tokenizers.apart(function, *arguments, **named)

    async def render(self, model: str, chat: Chat) -> str:
        """The text of a chat's prompt. Raises `HoldfastError`."""
        self.check_overload()
        await self._tokenizers.check(chat, chat.check, self._limits)
        return await self._tokenizers.render(self.model(model).name, chat)

    async def check_structure(self, model: str, structure: StructuredOutputs) -> None:
        """Raises `InvalidRequestError` for a shape that cannot be enforced."""
        structure_chars, limit = structure.num_chars, self._limits.max_grammar_length
        if structure_chars > limit:
            told = f"must have at most {limit} characters (limits.max_grammar_length), not {structure_chars}"
            raise InvalidRequestError("structured_outputs", structure.text[:100], told)
        await self._tokenizers.grammar(self.model(model).name, structure)

    def chat_style(self, model: str, *, has_tools: bool = False, template: str = "") -> ChatStyle:
        """In which formats a model that is served here writes calls and reasoning, by the chat template that chats with
        or without tools have, or the one named. Raises `HoldfastError`.
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
        """That of a model that is served here."""
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


def _received(sequences: Sequence[NewSequence], resume: ResumeRecord, echo: str) -> tuple[OutputDelta, ...]:
    """What the client of a resumed request has already, of each sequence of which it has any."""
    resumed = sequences[: len(resume.sequences)]
    received = (received_delivery(one, index, resume, echo) for index, one in enumerate(resumed))
    return tuple(one for one in received if one is not None)
