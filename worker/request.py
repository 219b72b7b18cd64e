"""Requests to an engine and their results, as plain data.

Frozen dataclasses and enums, with the checks of their own fields.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import MAX_WHOLE
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import checked_text

NUM_STEPS_TO_CLEAR: Final = 8
"""Steps with output that clear a suspect. Router and replica count them alike, the router a little later."""

MAX_CACHE_TTL_S: Final = 24 * 3600
"""Longest time for which a request may ask that its prefix is kept."""


class PoisonRisk(IntEnum):
    """Suspicion, at submission, that a request kills the replicas that run it."""

    NONE = 0
    SUSPECT = 1
    """The request has run on replicas that died, and made no progress since: one more death is too many."""
    ON_TRIAL = 2
    """If this replica dies, this request is the cause: no suspect of another router may run beside it."""


class Priority(IntEnum):
    """Priority classes. A smaller value is served first and preempted last."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3

    @classmethod
    def of_number(cls, number: int) -> "Priority":
        """Priority of vLLM's number, of which lower ones go first and 0 is normal."""
        return cls.NORMAL if number == 0 else cls.HIGH if number < 0 else cls.LOW


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop string."""
    LENGTH = "length"
    """`max_tokens` was reached, or the model's context is full."""
    ABORT = "abort"
    """The caller cancelled."""


class RequestKey(NamedTuple):
    """Router's key of a client's request. A client chooses `request_id` alone: whatever it writes there names no
    request of another tenant, and no part of a request.
    """

    tenant: str
    request_id: str
    part: int = 0
    """Which of several prompts that came under one id."""

    def __str__(self) -> str:
        """Differs for different keys, whatever is in their texts."""
        return f"{self.part}:{len(self.tenant)}:{self.tenant}{self.request_id}"


class SequenceKey(NamedTuple):
    """Router's key of one sequence of a request: a sibling of parallel sampling, or one step of a beam."""

    tenant: str
    request_id: str
    part: int = 0
    sequence_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Order of service and account of a request: the same from the client's request to the engine's. Affects no
    token.
    """

    priority: Priority = Priority.NORMAL
    tenant: str = ""
    """On whose account it runs: tenants get service by their shares. All without a name are one tenant."""
    cache_salt: str = ""
    """Only requests with the same salt find each other's prefixes in the cache, and so cannot time each other's."""
    session_id: str = ""
    """The conversation that it belongs to: with session affinity, the requests of one go to the same replica. It is
    not sent to engines.
    """
    cache_ttl_s: int = 0
    """Seconds for which its prompt's prefix is to stay in the cache, counted from when it is computed or found there;
    0: as long as there is room.
    """
    cache_prefix_tokens: int = 0
    """Tokens of the prompt, from its beginning, for which `cache_ttl_s` holds; 0: all."""

    @property
    def service(self) -> dict[str, Any]:
        """These fields, for another request of the same service."""
        return dict(zip(SERVICE_FIELDS, _service_values(self), strict=True))

    def check_service(self) -> None:
        """Raises `InvalidRequestError` for a value of the wrong type: queues order by priorities, and caches hash
        salts, long after their caller is gone.
        """
        if not isinstance(self.priority, Priority):
            names = ", ".join(f"Priority.{one.name}" for one in Priority)
            raise InvalidRequestError("priority", self.priority, f"must be one of {names}")
        for name in SERVICE_TEXTS:
            checked_text(name, getattr(self, name))
        for name, most in (("cache_ttl_s", MAX_CACHE_TTL_S), ("cache_prefix_tokens", MAX_WHOLE)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise InvalidRequestError(name, value, f"must be a whole number from 0 to {most}")


SERVICE_FIELDS: Final = tuple(Service.__dataclass_fields__)
_service_values: Final = attrgetter(*SERVICE_FIELDS)
SERVICE_TEXTS: Final = ("tenant", "cache_salt", "session_id")


class KeptPrefix(NamedTuple):
    """First tokens of a prompt that are to stay in the cache."""

    num_tokens: int
    ttl_s: int
    """Seconds from when they are computed or found."""


class PinnedPrefix(NamedTuple):
    """Prefix that is pinned, as one replica hands it on to another."""

    tenant: str
    ttl_s: float
    """Seconds for which it is still to be kept."""
    hashes: tuple[bytes, ...]
    """Hash of the root, and of each of its blocks in order."""


class StoredPin(NamedTuple):
    """Prefix that the store below the cache keeps, because requests have asked for it."""

    tenant: str
    ttl_s: float
    """Seconds for which it is still to be kept."""
    last_hash: bytes
    """Hash of its last block that is stored."""
    num_blocks: int


class BlockSource(NamedTuple):
    """Another replica that has blocks of a request's prefix, with the same keys and values. Advice, which may be
    wrong.
    """

    address: str
    """Address of its link."""
    num_tokens: int
    """Tokens, from the first one on, whose blocks it has."""
    is_computing: bool = False
    """Whether it computes them now, and has them one after the other."""
    block_size: int = 0
    """Tokens of its blocks; 0: as many as here."""
    is_leaving: bool = False
    """Whether it leaves, and its requests go where their blocks go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest(Service):
    """A tokenized request, as engines take it. It checks nothing: that it has a prompt and a seed, and the types of all
    fields, are checked where they come in, at the router's admission and at the replica's end of a link.

    A request with `output_token_ids` goes on after them: this one mechanism serves failover, draining and preemption.
    The sequence then draws output token number `len(output_token_ids)` next, and reports indices from there.
    """

    request_id: str
    """The caller's id, for logs and traces. Routers know the request by `sequence_key`, replicas by `AttemptKey`; an
    engine that is given no key knows it by this."""
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Tokens emitted before, by this or another replica."""
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    """The bad words of `sampling_params` as token ids, each in every way that it may be written."""
    adapter: Adapter | None = None
    """Adapter that it runs with; None: the model alone."""
    pooling: PoolingParams | None = None
    """Wish for a vector or scores of its prompt: then it draws nothing; None: it draws an output."""
    second_start: int = 0
    """Place of the first prompt token that is counted to the second of two texts (token type 1); 0: there is none."""
    grammar: str = ""
    """The structured outputs of `sampling_params` as a grammar of llguidance; empty: the output may be anything."""
    group_id: Hashable = ""
    """Group of requests with the same prompt and salt, which share computed blocks; empty: none. Of several links, a
    `GroupKey`."""
    time_left_s: float | None = None
    """Seconds that the caller will still wait when the request is submitted; None: for ever. Touches no token."""
    poison_risk: PoisonRisk = PoisonRisk.NONE
    """Risk of killing the replicas that run it. Affects no token."""
    traceparent: str = ""
    """W3C trace context of its trace; empty: it is not traced. Touches no token."""
    block_source: BlockSource | None = None
    """Another replica that has blocks of its prefix. Touches no token."""
    part: int = 0
    """Same as in `RequestKey`. Like `sequence_index`, it is routers' alone, and not sent to engines."""
    sequence_index: int = 0
    """Which sequence of its request it is."""
    cache_marks: tuple[KeptPrefix, ...] = ()
    """Prefixes of the prompt that are to stay in the cache, beside that of `cache_ttl_s`."""

    @property
    def key(self) -> RequestKey:
        """Key of the client's request that it belongs to."""
        return RequestKey(self.tenant, self.request_id, self.part)

    def stop_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end its output, of a model with these end-of-sequence tokens."""
        # An output with a grammar has an end, so that `ignore_eos` can put it off but not away.
        goes_on = self.sampling_params.ignore_eos and not self.grammar
        return frozenset(self.sampling_params.stop_token_ids) | (frozenset() if goes_on else eos_token_ids)

    @property
    def adapter_digest(self) -> str:
        """Digest of its adapter; empty without one."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def kept_prefixes(self) -> tuple[KeptPrefix, ...]:
        """Prefixes of the prompt that are to stay in the cache, the shortest first."""
        length = len(self.prompt_token_ids)
        asked = [*self.cache_marks, KeptPrefix(self.cache_prefix_tokens or length, self.cache_ttl_s)]
        return tuple(sorted(KeptPrefix(min(num_tokens, length), ttl_s) for num_tokens, ttl_s in asked if ttl_s))

    @property
    def sequence_key(self) -> SequenceKey:
        return SequenceKey(self.tenant, self.request_id, self.part, self.sequence_index)


class AttemptKey(NamedTuple):
    """Key of one attempt at a request where several links submit: keys of different links never meet. Made by the
    submitter; an engine only finds it again and gives it back.
    """

    link: str
    number: int


class GroupKey(NamedTuple):
    """Key of the requests of one group, likewise."""

    link: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's log-probability and rank: the log-softmax of the logits, before any logits processor or temperature.

    Taken in float64 and rounded to float32 once, so every wire carries it unchanged.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest. Equal logits rank by token id, the lowest first."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first, up to the requested number. The token may be here
    too.
    """


@dataclass(slots=True)
class TokenDelta:
    """The tokens that one request gained in one step, or its end. Not changed once made; it does not check this, since
    one is made for every sequence of every step, and that takes a frozen class six times as long.
    """

    attempt: Hashable
    """The key that the request was submitted by."""
    first_token_index: int
    """Output position of `token_ids[0]`, counted from the request's very first output token."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last delta of a request, exactly once."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache, not computed: by this request, or by the one of its group that
    computed the prompt for it. Reported with output token 0 and only there: once for a request, whatever happens
    later."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the prompt from the second on, where the request asks for them. Reported only with output
    token 0; for a long prompt, a link sends them in pieces before, each in a delta without other content.
    """
    queued_s: float = 0.0
    """Seconds that the request has waited in the engine before it first ran. Reported with its first tokens there."""
    num_disk_tokens: int = 0
    """Tokens among `num_cached_tokens` whose blocks were brought back from the disk for it."""
    num_draft_tokens: int = 0
    """Guessed tokens of this attempt that were verified up to here. Reported where several tokens come, and at its end.
    """
    num_accepted_tokens: int = 0
    """Tokens among `num_draft_tokens` that came true."""
    pooled: bytes = b""
    """Result of a pooling request, float32, little-endian, with its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of a replica: what routers balance on."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    """Tokens not yet computed for the waiting and running sequences."""
    num_free_blocks: int
    num_total_blocks: int
    num_foreign_suspects: int = 0
    """Requests of *other* routers here that are suspected of killing replicas: each router knows its own."""
