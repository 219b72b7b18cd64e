"""Request admission: the checks of a client's request, and the engine request that it becomes."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.router.config import LimitsConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.request_stream import stopping
from holdfast.router.events import ModelStatus
from holdfast.router.operator_state import Pause
from holdfast.router.overload.byte_ledger import current_lease
from holdfast.router.overload.overload import Overload
from holdfast.router.request import GenerationRequest, check_text
from holdfast.router.requests.answer import OpenAnswers
from holdfast.router.resume import NewSequence, check_ends, new_sequence
from holdfast.router.resume_record import ResumeRecord
from holdfast.router.security.gate import Caller, Gate
from holdfast.router.text.prompt import (
    check_encoded,
    check_length,
    check_prompt_logprobs,
    check_vocabulary,
    kept_tokens,
    resolved,
    with_counted_logprobs,
)
from holdfast.router.text.text_stream import TextStream
from holdfast.router.text.tokenizer import TooManyTokensError
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.worker.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelPausedError,
    QueueFullError,
    RateLimitError,
    ReplicaError,
    UnknownModelError,
)
from holdfast.worker.request import EngineRequest, Priority

RETRY_S: Final = 5.0
"""When to come again where a paused model refuses: nobody knows how long a pause takes."""


class Pauses:
    """The pauses of one router, and who waits for their ends. On one event loop."""

    def __init__(self, max_waiting: int) -> None:
        """At most `max_waiting` requests wait, all models together."""
        self._max_waiting = max_waiting
        self.models: dict[str, Pause] = {}
        """Those that are paused, by name."""
        self._changed = asyncio.Event()
        self.num_waiting = 0

    def set(self, pauses: Sequence[Pause]) -> None:
        """What holds from now on."""
        self.models = {pause.model: pause for pause in pauses}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_over(self, model: str, time_left_s: float) -> None:
        """Returns once a new request for a paused model may go on.

        Raises `ModelPausedError` where it is refused, `DeadlineExceededError` after `time_left_s`, `QueueFullError`.
        """
        if self.num_waiting >= self._max_waiting and not self.models[model].refuses:
            told = f"model {model!r} is paused, and {self.num_waiting} requests wait already (limits.max_queued)"
            raise QueueFullError(told, RETRY_S)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(time_left_s):
                await self._until_over(model)
        except TimeoutError:
            raise DeadlineExceededError(f"time was up while model {model!r} was paused by its operators") from None
        finally:
            self.num_waiting -= 1

    async def _until_over(self, model: str) -> None:
        while (pause := self.models.get(model)) is not None:
            if pause.refuses:
                raise ModelPausedError(model, RETRY_S)
            await self._changed.wait()


OPEN_RETRY_S: Final = 1.0
"""When to come again where a tenant has as many open requests as it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A request that has passed all checks."""

    engine_request: EngineRequest
    model: ModelStatus
    deadline: float
    echo: str
    """The prompt's text if the request asks for `echo`; else empty."""
    attempt: int
    caller: Caller


class RequestAdmission:
    """Admits requests to a router. Raises the `HoldfastError` of the first check that fails."""

    def __init__(
        self,
        dispatch_host: DispatchHost,
        tokenizers: TokenizerRegistry,
        limits: LimitsConfig,
        gate: Gate,
        open_answers: OpenAnswers,
        overload: Overload | None = None,
    ) -> None:
        self._dispatch_host = dispatch_host
        self._tokenizers = tokenizers
        self._limits = limits
        self._gate = gate
        self._open_answers = open_answers
        self._overload = overload
        self.is_closed = False
        """New requests are refused."""
        self.pauses = Pauses(limits.max_queued)
        """Which models take no new requests for now."""

    def models(self) -> tuple[ModelStatus, ...]:
        """Those that the caller may use."""
        return self._models_of(self._gate.caller())

    def _models_of(self, caller: Caller) -> tuple[ModelStatus, ...]:
        models = self._dispatch_host.dispatch.models()
        return models if caller.models is None else tuple(one for one in models if one.name in caller.models)

    def model(self, name: str) -> ModelStatus:
        """A model that has been served here; an empty name means the only one that the caller sees.

        Raises `UnknownModelError`, `InvalidRequestError` (a name is needed), `ReplicaError` (none is up yet),
        `PermissionDeniedError`.
        """
        caller = self._gate.caller()
        caller.check_model(name)
        return self._model(name, caller)

    def _model(self, name: str, caller: Caller) -> ModelStatus:
        dispatch = self._dispatch_host.dispatch
        if (status := dispatch.registry.statuses.get(name)) is not None:
            return status
        models = self._models_of(caller)
        if not name and len(models) == 1:
            return models[0]
        if dispatch.is_unknown_sleeper(name):
            raise ReplicaError(f"model {name!r} was at rest; it is being started")
        if not models:
            raise ReplicaError("no replica is up yet")
        names = tuple(one.name for one in models)
        if not name:
            raise InvalidRequestError("model", name, f"must be one of {', '.join(names)}")
        raise UnknownModelError(name, names)

    async def admit(self, request: GenerationRequest, time_remaining_s: float | None) -> AdmittedRequest:
        self.check_open()
        self.check_overload(request.priority, is_resumed=request.resume is not None)
        await self._tokenizers.check(request.chat, request.check, self._limits)
        caller, now = self._gate.caller(), self._dispatch_host.now()
        request = caller.charged(request, now)
        self.check_tenant(request.tenant)
        timeout_s = self._limits.default_timeout_s if request.timeout_s is None else request.timeout_s
        deadline = now + (timeout_s if time_remaining_s is None else min(timeout_s, time_remaining_s))
        model = self._model(request.model, caller)
        if request.resume is None and model.name in self.pauses.models:  # what has begun goes on
            await self.pauses.wait_over(model.name, deadline - now)
        engine_request = await self._engine_request(request, model)
        caller.took_tokens(len(engine_request.prompt_token_ids), now)
        echo = await self._echo(request, model.name, engine_request) if engine_request.sampling_params.echo else ""
        self.check_open()
        return AdmittedRequest(
            engine_request=engine_request,
            model=model,
            deadline=deadline,
            echo=echo,
            attempt=request.attempt,
            caller=caller,
        )

    def check_tenant(self, tenant: str) -> None:
        """Refuses what is more than one tenant may have open."""
        most = self._limits.max_open_per_tenant
        if most is not None and self._open_answers.num_of(tenant) >= most:
            told = f"its tenant has {most} open requests, which is the most (limits.max_open_per_tenant)"
            raise RateLimitError(told, OPEN_RETRY_S)

    async def new_sequence(
        self, sibling: EngineRequest, index: int, resume: ResumeRecord | None, admitted: AdmittedRequest
    ) -> NewSequence:
        """One sequence of a request, ready to open. A resumed one continues after what the client has."""
        text = TextStream(self._tokenizers[admitted.model.name], sibling.sampling_params, sibling.prompt_token_ids)
        if resume is None:
            return NewSequence(request=sibling, text=text)
        received, facts = resume.sequence(index).token_ids, admitted.model.facts
        field, num_prompt_tokens = f"resume.sequences[{index}].token_ids", len(sibling.prompt_token_ids)
        _check_room(field, len(received), num_prompt_tokens, facts.max_model_len)
        check_vocabulary(field, received, facts.vocab_size)
        check_ends(field, received, sibling, facts.eos_token_ids)
        await self._tokenizers.check_output(admitted.model.name, field, sibling.grammar, received, facts.eos_token_ids)
        return await asyncio.to_thread(new_sequence, sibling, text, resume, index, len(admitted.echo))

    def check_overload(self, priority: Priority = Priority.NORMAL, *, is_resumed: bool = False) -> None:
        """Raises `OverloadedError` where the router protects itself from what the running task asks for."""
        if self._overload is not None:
            lease, now = current_lease(), self._dispatch_host.now()
            is_guest = lease is not None and lease.is_guest
            self._overload.check_new(priority, is_resumed=is_resumed, now=now, is_guest=is_guest)

    def check_open(self) -> None:
        if self.is_closed:
            raise stopping()

    async def _engine_request(self, request: GenerationRequest, model: ModelStatus) -> EngineRequest:
        request_id, vocab_size = request.request_id or uuid.uuid4().hex, model.facts.vocab_size
        params = with_counted_logprobs(request.sampling_params, vocab_size, self._limits.max_logprobs)
        max_sequence_len, max_model_len = model.facts.max_sequence_len, model.facts.max_model_len
        token_ids = await self._prompt_token_ids(request, model)
        if params.truncate_prompt_tokens is not None:
            token_ids = kept_tokens(token_ids, params, max_sequence_len)
        self._check_length(request, model, len(token_ids))
        if params.prompt_logprobs is not None:
            check_prompt_logprobs(params, len(token_ids))
        if request.chat is None and not isinstance(request.prompt, str):
            check_vocabulary("token_ids", token_ids, vocab_size)  # not of more than a model takes
        else:
            check_encoded(request.prompt_field, token_ids, self._tokenizers[model.name], vocab_size)
        return EngineRequest(
            request_id=request_id,
            part=request.part,
            prompt_token_ids=token_ids,
            sampling_params=resolved(params, request_id, vocab_size=vocab_size, max_model_len=max_model_len),
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            session_id=request.session_id,
            bad_word_token_ids=await self._bad_words(params.bad_words, model) if params.bad_words else (),
            grammar="" if (shape := params.structure) is None else await self._tokenizers.grammar(model.name, shape),
        )

    def _check_length(self, request: GenerationRequest, model: ModelStatus, num_tokens: int) -> None:
        shown = request.prompt if request.chat is None else request.chat.messages
        longest, context = model.facts.max_sequence_len, model.facts.max_model_len
        check_length(request.prompt_field, shown, num_tokens, max_sequence_len=longest, max_model_len=context)

    async def _prompt_token_ids(self, request: GenerationRequest, model: ModelStatus) -> tuple[int, ...]:
        """The token ids of the whole prompt, before truncation."""
        text = request.prompt
        if request.chat is not None:
            text = await self._tokenizers.render(model.name, request.chat)
            check_text(text, self._limits, "chat")  # a template adds to each message
        if not isinstance(text, str):
            return text
        most = model.facts.max_sequence_len if request.sampling_params.truncate_prompt_tokens is None else None
        try:
            return await self._tokenizers.encode(model.name, text, request.chat is None, most)
        except TooManyTokensError as error:
            num_tokens = error.num_tokens
        self._check_length(request, model, num_tokens)
        raise AssertionError("a prompt beyond the model's length has passed")

    async def _bad_words(self, given: Sequence[str], model: ModelStatus) -> tuple[tuple[int, ...], ...]:
        """Those that the model can write: of a token beyond its vocabulary it has no logit."""
        words = await self._tokenizers.bad_words(model.name, given)
        return tuple(word for word in words if max(word) < model.facts.vocab_size)

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
