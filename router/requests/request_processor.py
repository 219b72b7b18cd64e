"""Request processor: turns a client's request into engine requests and opens them on the dispatch host.

What may live here: the choice of the model, tokenization, the limits that depend on the model, the seed. What may not:
wire formats (`router/wire/`), decisions about replicas (`router/dispatch/`).
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from holdfast.router.chat import Chat
from holdfast.router.config import LimitsConfig
from holdfast.router.dispatch.call import open_call, stopping
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.parallel_sampling import siblings
from holdfast.router.events import ModelStatus
from holdfast.router.request import GenerationRequest, check_text
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.beam_answer import BeamAnswer
from holdfast.router.requests.beam_search import BeamSearch
from holdfast.router.requests.open_answers import OpenAnswers
from holdfast.router.requests.output_signal import OutputSignal
from holdfast.router.requests.pauses import Pauses
from holdfast.router.requests.request_stats import RequestStats, RequestWatch, watching
from holdfast.router.requests.tracing import RequestTracer
from holdfast.router.resume import NewSequence, Resume, check_ends, new_sequence, received_delivery
from holdfast.router.security.gate import Caller, Gate
from holdfast.router.text.prompt import check_length, kept_tokens
from holdfast.router.text.text_stream import TextStream
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.router.text.vocabulary import check_vocabulary, resolved
from holdfast.router.tools.chat_style import ChatStyle
from holdfast.worker.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RateLimitError,
    ReplicaError,
    UnknownModelError,
)
from holdfast.worker.request import EngineRequest
from holdfast.worker.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

OPEN_RETRY_S: Final = 1.0
"""When to come again where a tenant has as many open requests as it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admitted:
    """A request that has passed all checks."""

    engine_request: EngineRequest
    model: ModelStatus
    deadline: float
    echo: str
    """The prompt's text if the request asks for `echo`; else empty."""
    attempt: int
    caller: Caller


class RequestProcessor:
    """Validates and tokenizes requests, and opens them on the dispatch host. Every protocol front end uses it."""

    def __init__(
        self,
        dispatch_host: DispatchHost,
        tokenizers: TokenizerRegistry,
        limits: LimitsConfig,
        gate: Gate | None = None,
        tracer: "Tracer | None" = None,
    ) -> None:
        """Without a `gate` everyone may ask for everything; without a `tracer` nothing is traced."""
        self._dispatch_host = dispatch_host
        self._gate = gate or Gate()
        self._tokenizers = tokenizers
        self._limits = limits
        self._is_closed = False
        self._chat_styles: dict[str, tuple[Tokenizer, ChatStyle]] = {}
        self._open_answers = OpenAnswers()
        self.pauses = Pauses(limits.max_queued)
        """Which models take no new requests for now."""
        self.stats = RequestStats()
        self._tracer = None if tracer is None else RequestTracer(tracer, dispatch_host.now)

    @property
    def is_closed(self) -> bool:
        """New requests are refused."""
        return self._is_closed

    def close(self) -> None:
        """From here on new requests are refused; open ones go on."""
        self._is_closed = True

    @asynccontextmanager
    async def open(
        self, request: GenerationRequest, time_remaining_s: float | None = None
    ) -> AsyncIterator[SampledAnswer]:
        """Opens a request and yields its response. Leaving the context cancels what has not ended.

        `time_remaining_s` is the time until the call's own deadline; the earliest limit holds. Raises `HoldfastError`.
        """
        admitted = await self._counted(self._admit(request, time_remaining_s))
        watch = self._watch(admitted)
        if self._tracer is not None:
            admitted = self._traced(self._tracer, admitted, watch)
        with watching(watch) as is_over, self._charging(admitted.caller, watch):
            async with self._while_it_is_read(admitted), self._opened(request, admitted, watch) as answer:
                yield answer
            is_over.append(answer.is_over)

    @asynccontextmanager
    async def _while_it_is_read(self, admitted: "_Admitted") -> AsyncIterator[None]:
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
        self, request: GenerationRequest, admitted: "_Admitted", watch: RequestWatch
    ) -> AsyncIterator[SampledAnswer]:
        engine_request, model = admitted.engine_request, admitted.model.name
        sequences = [
            await self._new_sequence(one, index, request.resume, admitted)
            for index, one in enumerate(siblings(engine_request))
        ]
        self._check_open()
        self._check_tenant(
            engine_request.request_id, engine_request.tenant
        )  # once more: others may have come meanwhile
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
        resume = request.resume or Resume()
        received = (
            received_delivery(one, index, resume, admitted.echo)
            for index, one in enumerate(sequences[: len(resume.sequences)])
        )
        answer = SampledAnswer(
            call,
            has_output,
            model,
            engine_request.sampling_params,
            engine_request.prompt_token_ids,
            received=tuple(one for one in received if one is not None),
            watch=watch,
            texts=[sequence.text for sequence in sequences],
        )
        with closing(call), self._open_answers.holding(answer, engine_request.tenant):
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
        admitted = await self._counted(self._admit(request, time_remaining_s))
        engine_request, model = admitted.engine_request, admitted.model
        self._check_tenant(engine_request.request_id, engine_request.tenant)
        search = BeamSearch.of(
            engine_request.sampling_params,
            len(engine_request.prompt_token_ids),
            model.facts.max_sequence_len,
            model.facts.eos_token_ids,
        )
        answer = BeamAnswer(
            engine_request,
            search,
            self._dispatch_host,
            model=model.name,
            tokenizer=self._tokenizers[model.name],
            deadline=admitted.deadline,
            echo=admitted.echo,
            client_attempt=admitted.attempt,
        )
        with watching(self._watch(admitted)), self._open_answers.holding(answer, engine_request.tenant):
            try:
                yield answer
            finally:
                admitted.caller.took_tokens(answer.num_tokens, self._dispatch_host.now())

    async def _counted(self, admitting: Awaitable["_Admitted"]) -> "_Admitted":
        try:
            return await admitting
        except BaseException as error:
            self.stats.refused(error)
            raise

    def _watch(self, admitted: "_Admitted") -> RequestWatch:
        now = self._dispatch_host.now
        return RequestWatch(self.stats, admitted.engine_request, admitted.model.name, now, now())

    def _traced(self, tracer: RequestTracer, admitted: "_Admitted", watch: RequestWatch) -> "_Admitted":
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
        check_text(text, self._limits)
        return await self._tokenizers.encode(self.model(model).name, text, add_special_tokens)

    async def tokenize_chat(self, model: str, chat: Chat) -> tuple[int, ...]:
        """The token ids of a chat's prompt. Raises `HoldfastError`."""
        chat.check(self._limits)
        text = await self._tokenizers.render(self.model(model).name, chat)
        check_text(text, self._limits, "chat")
        return await self._tokenizers.encode(self.model(model).name, text, add_special_tokens=False)

    async def render(self, model: str, chat: Chat) -> str:
        """The text of a chat's prompt. Raises `HoldfastError`."""
        chat.check(self._limits)
        return await self._tokenizers.render(self.model(model).name, chat)

    async def check_structure(self, model: str, structure: StructuredOutputs) -> None:
        """Raises `InvalidRequestError` for a shape that cannot be enforced."""
        structure_chars, limit = structure.num_chars, self._limits.max_grammar_length
        if structure_chars > limit:
            told = f"must have at most {limit} characters (limits.max_grammar_length), not {structure_chars}"
            raise InvalidRequestError("structured_outputs", structure.text[:100], told)
        await self._tokenizers.grammar(self.model(model).name, structure)

    def chat_style(self, model: str) -> ChatStyle:
        """In which formats a model that is served here writes calls and reasoning. Raises `HoldfastError`."""
        name = self.model(model).name
        tokenizer = self._tokenizers[name]
        known, style = self._chat_styles.get(name, (None, None))
        if style is None or known is not tokenizer:
            style = ChatStyle.of(tokenizer)
            self._chat_styles[name] = tokenizer, style
        return style

    def has_chat_template(self, model: str) -> bool:
        """Whether a model that is served here takes chats."""
        return self._tokenizers[model].chat_template is not None

    def token_text(self, model: str, token_id: int) -> str:
        """The text of a single token of a model that is served here; incomplete characters are U+FFFD."""
        return self._tokenizers[model].decode((token_id,), skip_special_tokens=False)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises `HoldfastError`."""
        status = self.model(model)
        if len(token_ids) > status.facts.max_model_len:
            limit = f"must be at most {status.facts.max_model_len} token ids, the model's maximum context length"
            raise InvalidRequestError("token_ids", tuple(token_ids[:10]), limit)
        check_vocabulary("token_ids", token_ids, status.facts.vocab_size)
        return await self._tokenizers.decode(status.name, tuple(token_ids))

    def models(self) -> tuple[ModelStatus, ...]:
        """Those that the caller may use."""
        caller = self._gate.caller()
        return tuple(model for model in self._dispatch_host.models() if caller.may_use(model.name))

    def model(self, name: str) -> ModelStatus:
        """A model that has been served here; an empty name means the only one that the caller sees.

        Raises `UnknownModelError`, `InvalidRequestError` (a name is needed), `ReplicaError` (none is up yet),
        `PermissionDeniedError`.
        """
        self._gate.caller().check_model(name)
        models = {model.name: model for model in self.models()}
        if name not in models and self._dispatch_host.is_starting(name):
            raise ReplicaError(f"model {name!r} was at rest; it is being started")
        if not models:
            raise ReplicaError("no replica is up yet")
        if not name and len(models) > 1:
            raise InvalidRequestError("model", name, f"must be one of {', '.join(models)}")
        if not name:
            return next(iter(models.values()))
        if name not in models:
            raise UnknownModelError(name, tuple(models))
        return models[name]

    async def _admit(self, request: GenerationRequest, time_remaining_s: float | None) -> "_Admitted":
        self._check_open()
        request.check(self._limits)
        caller, now = self._gate.caller(), self._dispatch_host.now()
        request = caller.charged(request, now)
        self._check_tenant(request.request_id, request.tenant)
        deadline = now + self._timeout_s(request, time_remaining_s)
        model = self.model(request.model)
        if request.resume is None:  # what has begun goes on
            await self.pauses.pass_by(model.name, deadline - now)
        engine_request = await self._engine_request(request, model)
        caller.took_tokens(len(engine_request.prompt_token_ids), now)
        echo = await self._echo(request, model.name, engine_request) if engine_request.sampling_params.echo else ""
        self._check_open()
        return _Admitted(
            engine_request=engine_request,
            model=model,
            deadline=deadline,
            echo=echo,
            attempt=request.attempt,
            caller=caller,
        )

    def _check_tenant(self, request_id: str, tenant: str) -> None:
        """Refuses what would touch another tenant's request, or is more than one tenant may have open."""
        most = self._limits.max_open_per_tenant
        if self._gate.is_locked and self._open_answers.belongs_to_another(request_id, tenant):
            raise InvalidRequestError("request_id", request_id, "is that of another open request")
        if most is not None and self._open_answers.num_of(tenant) >= most:
            told = f"its tenant has {most} open requests, which is the most (limits.max_open_per_tenant)"
            raise RateLimitError(told, OPEN_RETRY_S)

    async def _new_sequence(
        self, sibling: EngineRequest, index: int, resume: Resume | None, admitted: "_Admitted"
    ) -> NewSequence:
        """One sequence of a request, ready to open. A resumed one continues after what the client has."""
        text = TextStream(self._tokenizers[admitted.model.name], sibling.sampling_params, sibling.prompt_token_ids)
        if resume is None:
            return new_sequence(sibling, text, None, index)
        received, facts = resume.progress(index).token_ids, admitted.model.facts
        field, num_prompt_tokens = f"resume.sequences[{index}].token_ids", len(sibling.prompt_token_ids)
        check_vocabulary(field, received, facts.vocab_size)
        _check_room(field, len(received), num_prompt_tokens, facts.max_model_len)
        check_ends(field, received, sibling, facts.eos_token_ids)
        await self._tokenizers.check_output(admitted.model.name, field, sibling.grammar, received, facts.eos_token_ids)
        return await asyncio.to_thread(new_sequence, sibling, text, resume, index, len(admitted.echo))

    def _check_open(self) -> None:
        if self._is_closed:
            raise stopping()

    def _timeout_s(self, request: GenerationRequest, time_remaining_s: float | None) -> float:
        timeout_s = self._limits.default_timeout_s if request.timeout_s is None else request.timeout_s
        return timeout_s if time_remaining_s is None else min(timeout_s, time_remaining_s)

    async def _engine_request(self, request: GenerationRequest, model: ModelStatus) -> EngineRequest:
        request_id = request.request_id or uuid.uuid4().hex
        token_ids = await self._prompt_token_ids(request, model)
        token_ids = kept_tokens(token_ids, request.sampling_params, model.facts.max_sequence_len)
        shown = request.prompt if request.chat is None else request.chat.messages
        max_sequence_len, max_model_len = model.facts.max_sequence_len, model.facts.max_model_len
        check_length(
            request.prompt_field, shown, len(token_ids), max_sequence_len=max_sequence_len, max_model_len=max_model_len
        )
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=resolved(
                request.sampling_params, request_id, vocab_size=model.facts.vocab_size, max_model_len=max_model_len
            ),
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            session_id=request.session_id,
            bad_word_token_ids=await self._tokenizers.bad_words(model.name, request.sampling_params.bad_words),
            grammar=await self._tokenizers.grammar(model.name, request.sampling_params.structure),
        )

    async def _prompt_token_ids(self, request: GenerationRequest, model: ModelStatus) -> tuple[int, ...]:
        """The token ids of the whole prompt, before truncation."""
        if request.chat is not None:
            text = await self._tokenizers.render(model.name, request.chat)
            check_text(text, self._limits, "chat")  # a template adds to each message
            return await self._tokenizers.encode(model.name, text, add_special_tokens=False)
        if isinstance(request.prompt, str):
            return await self._tokenizers.encode(model.name, request.prompt)
        check_vocabulary("token_ids", request.prompt, model.facts.vocab_size)
        return request.prompt

    async def _echo(self, request: GenerationRequest, model: str, engine_request: EngineRequest) -> str:
        """The text that `echo` puts before the output; of a chat, the rendered prompt."""
        prompt = request.prompt if request.chat is None else engine_request.prompt_token_ids
        return await self._tokenizers.echo(model, prompt, engine_request)


def _check_room(field: str, num_received: int, num_prompt_tokens: int, max_model_len: int) -> None:
    """Raises `InvalidRequestError` if the received tokens do not fit into the context after the prompt."""
    most = max_model_len - num_prompt_tokens
    if num_received > most:
        limit = f"must have at most {most} tokens: this model's maximum context length is {max_model_len} tokens"
        raise InvalidRequestError(field, num_received, f"{limit}, and the prompt has {num_prompt_tokens}")
