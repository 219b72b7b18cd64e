"""Inputs and outputs of the dispatcher core, as plain data. Replica messages are types of the worker
(`worker/step_update.py`, `worker/model_info.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from holdfast.router.generation import OutputDelta
from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, SequenceKey
from holdfast.worker.step_update import EngineStats

# --- in: the text of one sequence ---


class TextPiece(Protocol):
    """The result of a push of tokens."""

    @property
    def text(self) -> str:
        """Text that is now certain."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are part of the output: all, unless a stop string ended among them."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: the output ends here."""


class TextState(Protocol):
    """Turns one sequence's tokens into text. A pure function of the tokens so far (`router/text/text_stream.py`)."""

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Text of further output tokens, without an incomplete character at the end."""
        ...

    @property
    def push_one(self) -> Callable[[int], str | None]:
        """Like `push`, for one token; returns its text. None: use `push`, because the token may end the output."""

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the output; None so far."""

    def finish(self) -> str:
        """The text that was still held back; called once, when the sequence has ended without a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp:
    """The result of pushing the tokens of a resumed request into a new text state (see `resume.py`)."""

    sent_text: str = ""
    """Text that the client has of the output, without an echo; empty if it has the sequence's end."""
    unsent_text: str = ""
    """Final text that the client does not have yet."""
    fingerprint: str = ""
    """`ModelInfo.fingerprint` of the replica that the output came from; empty if not known."""
    finish_reason: FinishReason | None = None
    """Set if the output is complete: there is nothing to continue."""


FRESH: Final = CaughtUp()
"""State of a request without output."""

# --- out: actions for the dispatch host ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSubmit:
    """Submit a request to a replica, which continues after the output tokens it carries."""

    replica_id: str
    attempt: int
    request: EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAbort:
    """Tell a replica to abort an attempt."""

    replica_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTakePins:
    """Tell a replica that another one leaves, whose pinned prefixes it is to pin."""

    replica_id: str
    address: str
    """Address of the draining replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAhead:
    """Tell a replica of a request that comes later, from its block source: it fetches the blocks."""

    replica_id: str
    attempt: int
    """The attempt that runs at the source."""
    request: EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request is over, with an error."""

    key: SequenceKey
    error: HoldfastError

    @property
    def request_id(self) -> str:
        return self.key.request_id


Action = SendSubmit | SendAbort | SendAhead | SendTakePins | OutputDelta | Fail


# --- out: queries ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """The state of a model that is, or was, served here."""

    name: str
    facts: ModelInfo
    """Capabilities that every replica that is up has: the smallest length and cache; row-invariant only if all are."""
    num_replicas: int
    """Replicas that are up."""
    wakes: bool = False
    """Whether the model may be without replicas by decision: a request starts one."""

    @property
    def takes_requests(self) -> bool:
        """Whether a request is served, at once or after a cold start."""
        return self.num_replicas > 0 or self.wakes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """Event of a replica, as a router sees it. It has nothing about requests."""

    at_s: float
    """Time by the router's clock."""
    kind: str
    """up, leaving, back, lost."""
    replica_id: str
    model: str
    reason: str = ""
    """Why, for people."""
    num_requests: int = 0
    """Requests that it ran for this router: they continue elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of a replica, as last reported."""

    replica_id: str
    model: str
    load: EngineLoad
    stats: EngineStats | None = None
    """None before its first report."""
    version: str = ""
    """`ModelInfo.version`."""
    is_retiring: bool = False
    """Whether it gets no new requests."""
    num_ranks: int = 1
    """Tensor-parallel ranks."""
    role: str = ""
    """Value of its `Role`; empty where replicas of its model have none."""
    received_from: Mapping[str, int] = field(default_factory=dict)
    """Tokens whose blocks came from other replicas, by their ids, or by the addresses of ids that are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFigures:
    """Size of the store, of all tenants and for all routers."""

    num_bytes: int
    max_bytes: int
    num_objects: dict[str, int]
    """Objects by kind."""
    num_jobs: dict[tuple[str, str], int]
    """Jobs by kind, `response` or `line`, and state: `waiting` for a router, or `running` at one."""
    oldest_job_s: float
    """Age of the oldest job; 0 where there is none."""
