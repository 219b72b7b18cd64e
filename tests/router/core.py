"""What the tests of the dispatch core share: a text state without a tokenizer, and a core with its time and actions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.events import Action, Fail, SendAbort, SendSubmit
from holdfast.router.generation import OutputDelta
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.request import (
    EngineLoad,
    EngineRequest,
    FinishReason,
    Priority,
    RequestKey,
    SequenceKey,
    TokenDelta,
)
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import EngineStats, PlainTokens, Rejection, StepUpdate

NO_LOAD = EngineLoad(num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=9, num_total_blocks=9)


def load(num_running: int = 0, num_waiting: int = 0, num_waiting_tokens: int = 0) -> EngineLoad:
    return replace(NO_LOAD, num_running=num_running, num_waiting=num_waiting, num_waiting_tokens=num_waiting_tokens)


@dataclass(frozen=True)
class Piece:
    text: str
    num_tokens: int
    stopped: bool = False


@dataclass
class LetterText:
    """Token 0 is "a", 25 is "z"; output stops after the token `stop_at`. The last letter is always held back."""

    stop_at: int | None = None
    held_back: str = ""
    matched: str | None = None

    def push(self, token_ids: Sequence[int]) -> Piece:
        kept = list(token_ids)
        stopped = self.stop_at in kept
        if stopped:
            kept = kept[: kept.index(self.stop_at) + 1]
        text = self.held_back + "".join(chr(ord("a") + token_id % 26) for token_id in kept)
        self.held_back = "" if stopped else text[-1:]
        return Piece(text if stopped else text[:-1], len(kept), stopped)

    def push_one(self, token_id: int) -> str | None:
        if token_id == self.stop_at:
            return None
        return self.push((token_id,)).text

    def finish(self) -> str:
        return self.held_back


@dataclass
class Core:
    """A `Dispatch` with a clock that is moved by hand. Replicas are drawn in order: 0, 0, 0, ..."""

    config: RouterConfig = field(default_factory=RouterConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.dispatch = Dispatch(self.config, self.limits, lambda n: 0)

    def up(self, replica_id: str = "r", model: str = "m", load: EngineLoad = NO_LOAD) -> list[Action]:
        return self._checked(self.dispatch.replica_up(facts(replica_id, model), load, self.now))

    def down(self, replica_id: str = "r", error: HoldfastError | None = None) -> list[Action]:
        error = error or ReplicaError(f"replica {replica_id} was lost")
        return self._checked(self.dispatch.replica_down(replica_id, error, self.now))

    def remove_models(self, *names: str) -> list[Action]:
        return self._checked(self.dispatch.models_removed(frozenset(names)))

    def submit(
        self,
        name: str,
        *,
        model: str = "m",
        priority: Priority = Priority.NORMAL,
        timeout_s: float = 60.0,
        stop_at: int | None = None,
        num_prompt_tokens: int = 3,
        group_id: str = "",
        tenant: str = "",
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        output: Sequence[int] = (),
        client_attempt: int = 0,
    ) -> list[Action]:
        params = SamplingParams(seed=1, max_tokens=100, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        request_id, sequence_index = spelled(name) if group_id else (name, 0)
        request = EngineRequest(
            request_id=request_id,
            sequence_index=sequence_index,
            prompt_token_ids=(7,) * num_prompt_tokens,
            sampling_params=params,
            priority=priority,
            group_id=group_id,
            tenant=tenant,
            output_token_ids=tuple(output),
        )
        state = RequestState(
            request=request,
            model=model,
            text=LetterText(stop_at),
            deadline=self.now + timeout_s,
            client_attempt=client_attempt,
        )
        return self._checked(self.dispatch.submit(state, self.now))

    def supersede(self, request_id: str, client_attempt: int = 0, *, tenant: str = "") -> list[Action]:
        return self._checked(self.dispatch.supersede(RequestKey(tenant, request_id), client_attempt, self.now))

    def cancel(self, name: str) -> list[Action]:
        return self._checked(self.dispatch.cancel(self.key(name), self.now))

    def abort(self, name: str) -> list[Action]:
        return self._checked(self.dispatch.abort(self.key(name), self.now))

    def key(self, name: str) -> SequenceKey:
        """Of what was submitted under this name, if it is open."""
        open_keys = [state.key for state in self.dispatch._requests]
        written = [key for key in open_keys if key.request_id == name] or [
            key for key in open_keys if (key.request_id, key.sequence_index) == spelled(name)
        ]
        return written[0] if written else SequenceKey("", name)

    def step(
        self,
        *deltas: TokenDelta,
        replica_id: str = "r",
        rejections: Sequence[Rejection] = (),
        load: EngineLoad = NO_LOAD,
        stats: EngineStats | None = None,
    ) -> list[Action]:
        plain, others = PlainTokens.split(deltas)  # as a link has them
        news = StepUpdate(load=load, plain=plain, deltas=others, rejections=rejections, stats=stats)
        return self._checked(self.dispatch.step(replica_id, news, self.now))

    def tick(self, after_s: float = 0.0) -> list[Action]:
        self.now += after_s
        return self._checked(self.dispatch.tick(self.now))

    def _checked(self, actions: list[Action]) -> list[Action]:
        self.dispatch.check_integrity()
        return actions


def spelled(name: str) -> tuple[str, int]:
    """Tests call a sibling `ID/INDEX`."""
    request_id, _, index = name.rpartition("/")
    return request_id, int(index) if index.isdecimal() else -1


def facts(replica_id: str = "r", model: str = "m", **changes: object) -> ReplicaFacts:
    known = {
        "max_model_len": 1000,
        "vocab_size": 100,
        "tensor_parallel_size": 2,
        "block_size": 16,
        "num_blocks": 9,
        "row_invariant": True,
        "path": "/nowhere",
        "model_type": "",
        "dtype": "",
        "kv_bytes_per_token": 8,
        "eos_token_ids": frozenset(),
        "address": f"host-of-{replica_id}:1",
    }
    return ReplicaFacts(replica_id=replica_id, model=model, **(known | changes))


def delta(attempt: int, first: int, *token_ids: int, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(attempt=attempt, first_token_index=first, token_ids=token_ids, finish_reason=finish)


def sent(actions: Sequence[Action]) -> SendSubmit:
    """The one submission among `actions`."""
    (submission,) = [action for action in actions if isinstance(action, SendSubmit)]
    return submission


def delivered(actions: Sequence[Action]) -> OutputDelta:
    (delta,) = [action for action in actions if isinstance(action, OutputDelta)]
    return delta


def failure(actions: Sequence[Action]) -> Fail:
    (fail,) = [action for action in actions if isinstance(action, Fail)]
    return fail


def aborts(actions: Sequence[Action]) -> list[tuple[str, int]]:
    return [(action.replica_id, action.attempt) for action in actions if isinstance(action, SendAbort)]


def one_replica() -> Core:
    """Its replica is "r"."""
    core = Core()
    core.up("r")
    return core


def two_replicas() -> Core:
    """The first request goes to "a"."""
    core = Core()
    core.up("a")
    core.up("b", load=load(num_running=1))
    return core


def queueing_core(max_queued: int = 2) -> Core:
    """One replica that takes one waiting request and has it: whatever comes next waits in the router."""
    core = Core(RouterConfig(max_waiting_per_replica=1), LimitsConfig(max_queued=max_queued))
    core.up("r")
    core.submit("running")
    return core


def rejected(attempt: int, error: Exception) -> Rejection:
    return Rejection(attempt=attempt, error=error)
