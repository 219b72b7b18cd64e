"""Request processor: opens clients' requests on the dispatch host, and answers what they ask about text.

What may live here: the life of an open request, with its figures and its trace. What may not: checks of a request and
what becomes of it (`request_admission.py`), wire formats (`router/wire/`), decisions about replicas
(`router/dispatch/`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.router.chat import Chat
from holdfast.router.config import LimitsConfig
from holdfast.router.dispatch.call import Call, open_call
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.parallel_sampling import siblings
from holdfast.router.events import Deliver, ModelStatus
from holdfast.router.field_names import naming
from holdfast.router.overload.byte_ledger import current_lease
from holdfast.router.overload.overload import Overload
from holdfast.router.request import GenerationRequest, check_text
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.beam_answer import BeamAnswer
from holdfast.router.requests.beam_search import BeamSearch
from holdfast.router.requests.open_answers import OpenAnswers
from holdfast.router.requests.output_signal import OutputSignal
from holdfast.router.requests.pauses import Pauses
from holdfast.router.requests.poison_watch import current_reading
from holdfast.router.requests.request_admission import AdmittedRequest, RequestAdmission
from holdfast.router.requests.request_stats import RequestStats, RequestWatch, watching
from holdfast.router.requests.tracing import RequestTracer
from holdfast.router.resume import NewSequence, Resume, received_delivery
from holdfast.router.security.gate import Caller, Gate
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.router.text.vocabulary import check_vocabulary
from holdfast.router.tools.chat_style import ChatStyle
from holdfast.worker.errors import (
    DeadlineExceededError,
    InvalidRequestError,
)
from holdfast.worker.request import Priority
from holdfast.worker.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


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
            async with self._open_named(request, time_remaining_s) as answer:
                yield answer

    @asynccontextmanager
    async def _open_named(
        self, request: GenerationRequest, time_remaining_s: float | None
    ) -> AsyncIterator[SampledAnswer]:
        admitted = await self._counted(self._admission.admit(request, time_remaining_s))
        watch = self._watch(admitted)
        if self._tracer is not None:
            admitted = self._traced(self._tracer, admitted, watch)
        with watching(watch) as is_over, self._charging(admitted.caller, watch):
            async with self._while_it_is_read(admitted), self._opened(request, admitted, watch) as answer:
                yield answer
            is_over.append(answer.is_over)

    @asynccontextmanager
    async def _while_it_is_read(self, admitted: AdmittedRequest) -> AsyncIterator[None]:
        """Ends the task of a reader that does not even take the error of its deadline."""
        time_left_s = admitted.deadline - self._dispatch_host.now() + self._limits.slow_reader_s
        try:
            async with asyncio.timeout(time_left_s) as reading:
                yield
        except TimeoutError:
            if not reading.expired():
                raise
            raise DeadlineExceededError("the answer was not read (limits.slow_reader_s)") from None

    @contextmanager
    def _charging(self, caller: Caller, watch: RequestWatch) -> Iterator[None]:
        """The caller is charged for the output when it is over, in whichever way it ends."""
        try:
            yield
        finally:
            caller.took_tokens(watch.num_tokens, self._dispatch_host.now())

    @asynccontextmanager
    async def _opened(
        self, request: GenerationRequest, admitted: AdmittedRequest, watch: RequestWatch
    ) -> AsyncIterator[SampledAnswer]:
        engine_request, model = admitted.engine_request, admitted.model.name
        sequences = [
            await self._admission.new_sequence(one, index, request.resume, admitted)
            for index, one in enumerate(siblings(engine_request))
        ]
        self._admission.check_open()
        # Once more: others may have come meanwhile.
        self._admission.check_tenant(engine_request.tenant)
        has_output = OutputSignal()
        call = open_call(
            self._dispatch_host,
            engine_request.request_id,
            sequences,
            model=model,
            deadline=admitted.deadline,
            on_output=has_output.set,
            client_attempt=admitted.attempt,
            echo=admitted.echo,
            watch=watch.note,
        )
        answer = SampledAnswer(
            call,
            has_output,
            model,
            engine_request.sampling_params,
            engine_request.prompt_token_ids,
            received=_received(sequences, request.resume or Resume(), admitted.echo),
            watch=watch,
            texts=[sequence.text for sequence in sequences],
            echo=admitted.echo,
        )
        _note_admitted()
        with closing(call), _leased(call), self._open_answers.holding(answer, engine_request.key):
            try:
                yield answer
            finally:
                watch.num_tokens, watch.timelines = call.num_tokens, call.timelines
                watch.reader_wait_s = call.behind_s

    @asynccontextmanager
    async def search(
        self, request: GenerationRequest, time_remaining_s: float | None = None
    ) -> AsyncIterator[BeamAnswer]:
        """As `open`, for a request with a `beam_width`. The search begins with `whole`."""
        with naming(request.names):
            async with self._search_named(request, time_remaining_s) as answer:
                yield answer

    @asynccontextmanager
    async def _search_named(
        self, request: GenerationRequest, time_remaining_s: float | None
    ) -> AsyncIterator[BeamAnswer]:
        admitted = await self._counted(self._admission.admit(request, time_remaining_s))
        self._admission.check_tenant(admitted.engine_request.tenant)
        watch = self._watch(admitted)
        if self._tracer is not None:
            admitted = self._traced(self._tracer, admitted, watch)
        answer = self._beam_answer(admitted, watch)
        _note_admitted()
        with watching(watch) as is_over, self._charging(admitted.caller, watch):
            async with self._while_it_is_read(admitted):
                with self._open_answers.holding(answer, admitted.engine_request.key):
                    try:
                        yield answer
                    finally:
                        watch.num_tokens, watch.timelines = answer.num_tokens, answer.timelines
            is_over.append(answer.is_over)

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

    async def _counted(self, admitting: Awaitable[AdmittedRequest]) -> AdmittedRequest:
        try:
            return await admitting
        except BaseException as error:
            self.stats.refused(error)
            raise

    def _watch(self, admitted: AdmittedRequest) -> RequestWatch:
        now = self._dispatch_host.now
        return RequestWatch(self.stats, admitted.engine_request, admitted.model.name, now, now())

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

    async def tokenize_chat(self, model: str, chat: Chat) -> tuple[int, ...]:
        """The token ids of a chat's prompt. Raises `HoldfastError`."""
        self.check_overload()
        chat.check(self._limits)
        text = await self._tokenizers.render(self.model(model).name, chat)
        check_text(text, self._limits, "chat")
        return await self._tokenizers.encode(self.model(model).name, text, add_special_tokens=False)

    async def render(self, model: str, chat: Chat) -> str:
        """The text of a chat's prompt. Raises `HoldfastError`."""
        self.check_overload()
        chat.check(self._limits)
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


def _note_admitted() -> None:
    if (reading := current_reading()) is not None:
        reading.admitted()


@contextmanager
def _leased(call: Call) -> Iterator[None]:
    """The input of the running task's request is decoded; what its lease holds from here on is unread output."""
    lease = current_lease()
    if lease is None:
        yield
        return
    lease.give_back()
    lease.endings.append(call)
    try:
        yield
    finally:
        lease.endings.remove(call)


def _received(sequences: Sequence[NewSequence], resume: Resume, echo: str) -> tuple[Deliver, ...]:
    """What the client of a resumed request has already, of each sequence of which it has any."""
    resumed = sequences[: len(resume.sequences)]
    received = (received_delivery(one, index, resume, echo) for index, one in enumerate(resumed))
    return tuple(one for one in received if one is not None)
