"""The words that go into the dispatch core and come out of it, as plain data; what replicas say is in words of the
worker (`worker/step_update.py`, `worker/model_info.py`).

What may live here: frozen dataclasses, and what each of them promises. What may not: decisions (`dispatch.py`), wire
formats (`router/wire/`), IO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, TokenLogprob
from holdfast.worker.stats import EngineStats

# --- in: the text of one sequence ---


class TextPiece(Protocol):
    """What tokens turned into."""

    @property
    def text(self) -> str:
        """Text that is now certain."""

    @property
    def num_tokens(self) -> int:
        """How many of the tokens are part of the output: all, unless a stop string ended among them."""

    @property
    def stopped(self) -> bool:
        """A stop string is complete: the output ends here."""


class TextState(Protocol):
    """Turns one sequence's tokens into text. A pure function of the tokens pushed so far (see `text_stream.py`)."""

    def push(self, token_ids: Sequence[int]) -> TextPiece: ...

    def finish(self) -> str:
        """The text that was still held back; called once, when the sequence has ended without a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp:
    """What came of the output that a request begins with, when its tokens were pushed again (see `resume.py`)."""

    unsent_text: str = ""
    """Text that is certain and that the client has not got."""
    fingerprint: str = ""
    """Of where the output came from; empty if not known."""
    finish_reason: FinishReason | None = None
    """Set if the output is complete: there is nothing to go on with."""


FRESH: Final = CaughtUp()
"""Of a request without output."""

# --- out: what the shell must do ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request has cost, in tokens."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    """Those of `num_prompt_tokens` that were cached. As of the first attempt that came to a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSubmit:
    """Ask a replica to run a request, from the output tokens that it carries on."""

    replica_id: str
    attempt: int
    request: EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAbort:
    """Tell a replica that nobody waits for this attempt any more."""

    replica_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Output for the client. The deliveries of one request continue each other without gap or overlap."""

    request_id: str
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    """Set on the last delivery, and `usage` with it: the request is over."""
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each prompt token from the second on where the request asks for them; on the first delivery alone."""
    sequence_index: int = 0
    """Which of the client's completions it belongs to."""
    num_cached_tokens: int = 0
    """As `Usage` says it in the end."""
    fingerprint: str = ""
    """`ModelInfo.fingerprint` of where the tokens come from."""
    identity_guaranteed: bool = True
    """False once the request went on where equal tokens are not certain: the text is sound, another run may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request is over, with an error."""

    request_id: str
    error: HoldfastError


Action = SendSubmit | SendAbort | Deliver | Fail


# --- out: what can be asked ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """What is known of a model that is, or was, served here."""

    name: str
    facts: ModelInfo
    """Such that every replica that is up can do it: the smallest length and cache, invariant only if all are."""
    num_replicas: int
    """Replicas that are up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """How busy a replica is, as it last said."""

    replica_id: str
    model: str
    load: EngineLoad
    stats: EngineStats | None = None
    """None until it has told."""
