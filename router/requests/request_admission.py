"""Request admission: the checks of a client's request, and the sequences that it becomes."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from holdfast.router.config import LimitsConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.endings import stopping
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.events import FRESH, CaughtUp, ModelStatus
from holdfast.router.operator_state import NO_OPERATOR_STATE, NamedAdapter, OperatorState, Pause
from holdfast.router.overload.byte_ledger import CURRENT_LEASE
from holdfast.router.overload.overload import Overload
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import OpenAnswers
from holdfast.router.requests.request_stats import AdmittedRequest, RequestStats
from holdfast.router.resume import ResumeRecord, check_ends, resumed
from holdfast.router.security.gate import ANYONE, Caller, Gate
from holdfast.router.text.head_lines import HeadLine, tidied
from holdfast.router.text.prompt import check_vocabulary
from holdfast.router.text.text_stream import TextStream
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelPausedError,
    QueueFullError,
    RateLimitError,
    ReplicaError,
    UnknownModelError,
    VersionGoneError,
)
from holdfast.worker.model_info import adapter_of, version_of
from holdfast.worker.request import EngineRequest, Priority

RETRY_S: Final = 5.0
"""Retry delay in seconds where a paused model refuses: the length of a pause is unknown."""


class Pauses:
    """The pauses of one router, and who waits for their ends. On one event loop."""

    def __init__(self, max_waiting: int) -> None:
        """Lets at most `max_waiting` requests wait, all models together."""
        self._max_waiting = max_waiting
        self.models: dict[str, Pause] = {}
        """Paused models by name."""
        self._changed = asyncio.Event()
        self.num_waiting = 0

    def set(self, pauses: Sequence[Pause]) -> None:
        """Sets the pauses from now on."""
        self.models = {pause.model: pause for pause in pauses}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_over(self, model: str, time_left_s: float) -> None:
        """Returns once a new request for a paused model may go on.

        Raises `ModelPausedError` where it is refused, `DeadlineExceededError` after `time_left_s`, `QueueFullError`.
        """
        if self.num_waiting >= self._max_waiting and not self.models[model].refuses:
            message = f"model {model!r} is paused, and {self.num_waiting} requests wait already (limits.max_queued)"
            raise QueueFullError(message, RETRY_S)
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


class ServedAdapter(NamedTuple):
    """An adapter, and the model that it belongs to."""

    model: str
    adapter: Adapter


class Adapters:
    """The adapters of one router, by the names that requests give as their model."""

    def __init__(self, statuses: Callable[[], Mapping[str, ModelStatus]]) -> None:
        """`statuses`: status of the served models; their replicas report the adapters that they were started with."""
        self._statuses = statuses
        self._state = NO_OPERATOR_STATE
        self._named: dict[str, NamedAdapter] = {}
        self.exact: dict[str, ServedAdapter] = {}
        """Adapters by `Adapter.key`, for callers who mean one content, independent of names."""

    def set(self, operator_state: OperatorState) -> None:
        """Sets the adapters that operators have loaded or unloaded."""
        self._state, self._named = operator_state, {one.name: one for one in operator_state.adapters}

    def find(self, name: str) -> ServedAdapter | None:
        """The adapter of a name that is no model's; None: there is none."""
        if (named := self._named.get(name)) is not None:
            return None if named.adapter is None else ServedAdapter(named.model, named.adapter)
        if (exact := self.exact.get(name)) is not None:
            return exact
        return next((one for one in self._of_replicas() if one.adapter.name == name), None)

    def of(self, model: str) -> list[Adapter]:
        """All of a model, by name."""
        return self._state.adapters_of(model, [one.adapter for one in self._of_replicas() if one.model == model])

    def _of_replicas(self) -> Iterator[ServedAdapter]:
        for model, status in self._statuses().items():
            for adapter in status.facts.adapters:
                yield ServedAdapter(model, adapter)


OPEN_RETRY_S: Final = 1.0
"""Retry time for a tenant at its maximum of open requests."""


class RequestAdmission:
    """Admits requests to a router. Raises the `HoldfastError` of the first check that fails."""

    def __init__(
        self,
        dispatch_host: DispatchHost,
        tokenizers: TokenizerRegistry,
        limits: LimitsConfig,
        gate: Gate,
        open_answers: OpenAnswers,
        stats: RequestStats,
        overload: Overload | None = None,
        head_line_rules: Collection[str] = (),
    ) -> None:
        self._head_line_rules = head_line_rules
        self._dispatch_host = dispatch_host
        self._tokenizers = tokenizers
        self._limits = limits
        self._gate = gate
        self._asks_for_keys = gate.is_locked
        self._open_answers = open_answers
        self._stats = stats
        self._overload = overload
        self.is_closed = False
        """New requests are refused."""
        registry = dispatch_host.dispatch.registry
        self.adapters = Adapters(lambda: registry.statuses)
        self.pauses = Pauses(limits.max_queued)
        """Which models take no new requests for now."""

    def models(self) -> tuple[ModelStatus, ...]:
        """Models that the caller may use."""
        return self._models_of(self._gate.caller())

    def _models_of(self, caller: Caller) -> tuple[ModelStatus, ...]:
        models = tuple(self._dispatch_host.dispatch.registry.statuses.values())
        return models if caller.models is None else tuple(one for one in models if one.name in caller.models)

    def model(self, name: str) -> ModelStatus:
        """A model that was served here; an empty name means the only model that the caller may use.

        Raises `UnknownModelError`, `InvalidRequestError` (a name is needed), `ReplicaError` (no replica is up yet),
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
        if (served := self.adapters.find(name)) is not None and served.model in dispatch.registry.statuses:
            return dispatch.registry.statuses[served.model]
        if dispatch.is_unknown_sleeper(name):
            raise ReplicaError(f"model {name!r} was scaled to zero; it is being started")
        if not models:
            raise ReplicaError("no replica is up yet")
        names = tuple(one.name for one in models)
        if not name:
            raise InvalidRequestError("model", name, f"must be one of {', '.join(names)}")
        adapters = (one.name for status in models for one in self.adapters.of(status.name))
        raise UnknownModelError(
            name, (*names, *(one for one in adapters if caller.models is None or one in caller.models))
        )

    async def admit(self, request: GenerationRequest, time_remaining_s: float | None) -> AdmittedRequest:
        """Checks a request and encodes its prompt. `time_remaining_s`: seconds until the call's own deadline, or None.
        Raises the `HoldfastError` of the first check that fails.
        """
        self.check_open()
        if self._overload is not None:
            self.check_overload(request.priority, is_resumed=request.resume is not None)
        if request.chat is None:
            request.check(self._limits)
        else:
            await self._tokenizers.check(request.chat, request.check, self._limits)
        caller, clock = self._gate.caller() if self._asks_for_keys else ANYONE, self._dispatch_host.now
        now = clock()
        if caller is not ANYONE:
            request = caller.charged(request, now)
        if self._limits.max_open_per_tenant is not None:
            self.check_tenant(request.tenant)
        timeout_s = self._limits.default_timeout_s if request.timeout_s is None else request.timeout_s
        deadline = now + (timeout_s if time_remaining_s is None else min(timeout_s, time_remaining_s))
        model = self._dispatch_host.dispatch.registry.statuses.get(request.model) or self._model(request.model, caller)
        if request.resume is None and model.name in self.pauses.models:  # requests that have begun continue
            await self.pauses.wait_over(model.name, deadline - now)
        head_lines: Sequence[HeadLine] = ()
        if request.chat is not None:
            chat, head_lines = tidied(request.chat, self._head_line_rules)
            request = request if chat is request.chat else replace(request, chat=chat)
        served = None if request.model in ("", model.name) else self.adapters.find(request.model)
        engine_request = await self._tokenizers.engine_request(request, model, self._limits)
        if served is not None:
            engine_request = replace(engine_request, adapter=served.adapter)
        if caller.rates is not None:
            caller.took_tokens(len(engine_request.prompt_token_ids), now)
        has_echo = engine_request.sampling_params.echo
        echo = await self._tokenizers.echo(model.name, request, engine_request) if has_echo else ""
        params, tokenizer = engine_request.sampling_params, self._tokenizers[model.name]
        texts: list[TextStream] = []
        continued = () if engine_request.pooling is not None else engine_request.prompt_token_ids  # no text follows
        for _ in range(params.num_sequences):
            texts.append(TextStream(tokenizer, params, continued))
        if (lease := CURRENT_LEASE.get()) is not None:
            lease.give_back()  # the request's input is decoded
        self.check_open()
        admitted = AdmittedRequest(
            engine_request,
            model,
            self._stats,
            clock,
            caller=caller,
            deadline=deadline,
            client_attempt=request.attempt,
            echo=echo,
            texts=texts,
        )
        admitted.head_lines = head_lines
        return admitted

    def check_tenant(self, tenant: str) -> None:
        """Refuses requests beyond a tenant's maximum of open ones."""
        most = self._limits.max_open_per_tenant
        if most is not None and self._open_answers.num_of(tenant) >= most:
            message = f"its tenant has {most} open requests, the maximum (limits.max_open_per_tenant)"
            raise RateLimitError(message, OPEN_RETRY_S)

    async def sequence(
        self, admitted: AdmittedRequest, sibling: EngineRequest, resume: ResumeRecord | None
    ) -> RequestState:
        """One sequence of a request, ready to open. A resumed request continues after the client's output."""
        text, caught_up = admitted.texts[sibling.sequence_index], FRESH
        if resume is not None:
            sibling, caught_up = await self._resumed(admitted, sibling, text, resume)
        return RequestState(
            request=sibling,
            model=admitted.model,
            text=text,
            caught_up=caught_up,
            deadline=admitted.deadline,
            client_attempt=admitted.client_attempt,
        )

    async def _resumed(
        self, admitted: AdmittedRequest, sibling: EngineRequest, text: TextStream, resume: ResumeRecord
    ) -> tuple[EngineRequest, CaughtUp]:
        _check_adapter(sibling, resume)
        index, facts = sibling.sequence_index, admitted.facts
        received = resume.sequence(index).token_ids
        field, num_prompt_tokens = f"resume.sequences[{index}].token_ids", len(sibling.prompt_token_ids)
        _check_room(field, len(received), num_prompt_tokens, facts.max_model_len)
        check_vocabulary(field, received, facts.vocab_size)
        check_ends(field, received, sibling, facts.eos_token_ids)
        await self._tokenizers.check_output(admitted.model, field, sibling.grammar, received, facts.eos_token_ids)
        return await asyncio.to_thread(resumed, sibling, text, resume, len(admitted.echo))

    def check_overload(self, priority: Priority = Priority.NORMAL, *, is_resumed: bool = False) -> None:
        """Raises `OverloadedError` if the router sheds the running task's request."""
        if self._overload is not None:
            lease, now = CURRENT_LEASE.get(), self._dispatch_host.now()
            is_guest = lease is not None and lease.is_guest
            self._overload.check_new(priority, is_resumed=is_resumed, now=now, is_guest=is_guest)

    def check_open(self) -> None:
        """Raises RequestAbortedError, which clients may retry, while the router stops."""
        if self.is_closed:
            raise stopping()


def _check_adapter(request: EngineRequest, resume: ResumeRecord) -> None:
    """Raises `VersionGoneError` where the output that the client has comes from another adapter than the name's."""
    before, now = adapter_of(resume.fingerprint), request.adapter_digest
    if resume.fingerprint and (not now.startswith(before) if before else bool(now)):
        name = request.adapter.name if request.adapter is not None else "the model alone"
        reason = f"{name} is another adapter now than at the beginning of the answer"
        raise VersionGoneError(name, f"lora-{before}" if before else version_of(resume.fingerprint), reason)


def _check_room(field: str, num_received: int, num_prompt_tokens: int, max_model_len: int) -> None:
    """Raises `InvalidRequestError` if the received tokens do not fit into the context after the prompt."""
    most = max_model_len - num_prompt_tokens
    if num_received > most:
        limit = f"must have at most {most} tokens: this model's maximum context length is {max_model_len} tokens"
        raise InvalidRequestError(field, num_received, f"{limit}, and the prompt has {num_prompt_tokens}")
