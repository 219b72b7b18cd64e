"""Sessions, as one router sees them: requests that continue each other, their cached tokens, and the time saved.

A request belongs to the session that it names, or to the session whose last prompt is a prefix of its prompt: a chat's
next turn begins with the whole conversation before. So sessions are found of clients that name none. Clients whose
prompts begin with a line that changes with each call find no prefix: they are listed with the rule that would help
(`text/head_lines.py`).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from holdfast.router.events import ReplicaLoad
from holdfast.router.requests.request_stats import EndedRequest

MAX_SESSIONS: Final = 512
"""Sessions that are known; beyond it that is forgotten which was idle for longest."""

MAX_CLIENTS: Final = 512
"""Clients, by the line that spoils their prompts, likewise."""

MIN_TOKENS: Final = 32
"""Tokens from which a prompt without a session's name may be the first turn of one."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Turns that went on from each other."""

    tenant: str
    model: str
    name: str
    """Name given by the client; empty: none."""
    num_turns: int = 0
    num_prompt_tokens: int = 0
    """Tokens of the last prompt."""
    num_memory_tokens: int = 0
    """Prompt tokens of all turns that were cached in memory, and so not computed."""
    num_disk_tokens: int = 0
    num_computed_tokens: int = 0
    last_s: float = 0.0
    """When its last turn ended."""
    kept_until_s: float = 0.0
    """Until when its last prompt's prefix is kept; 0: as long as there is room."""

    @property
    def num_saved_tokens(self) -> int:
        return self.num_memory_tokens + self.num_disk_tokens


@dataclass(slots=True, kw_only=True)
class SpoiledPrompts:
    """Prompts of one client whose head had a line that was another one in the request before."""

    tenant: str
    rule: str
    line: str
    """The last one."""
    num_requests: int = 0
    num_tokens: int = 0
    """Tokens that were computed for them."""


class SessionBook:
    """Sessions of one router. Hears of each request that was admitted, when it is over."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str, bytes], Session] = OrderedDict()
        """Sessions by tenant, model, and name or digest of the last prompt; the least recently used first."""
        self._lengths: dict[tuple[str, str], dict[int, int]] = {}
        """Numbers of unnamed sessions by the length of their last prompt, by tenant and model."""
        self._spoiled: OrderedDict[tuple[str, str], SpoiledPrompts] = OrderedDict()

    def __call__(self, ended: EndedRequest) -> None:
        if ended.first_token_s is None:
            return
        request, now = ended.request, ended.ended_s
        if (session := self._session_of(ended)) is not None:
            timeline = ended.timeline
            num_disk = min(timeline.num_disk_tokens, timeline.num_cached_tokens)
            session.num_turns += 1
            session.num_prompt_tokens = ended.num_prompt_tokens
            session.num_memory_tokens += timeline.num_cached_tokens - num_disk
            session.num_disk_tokens += num_disk
            session.num_computed_tokens += ended.num_prompt_tokens - timeline.num_cached_tokens
            session.last_s = now
            session.kept_until_s = max((now + kept.ttl_s for kept in request.kept_prefixes), default=0.0)
        for rule, line in ended.head_lines:
            self._note_line(ended, rule, line)

    def sessions(self) -> list[Session]:
        """Named ones, and those of several turns; the one first whose turn ended last."""
        return [one for one in reversed(self._sessions.values()) if one.name or one.num_turns > 1]

    def spoiled(self) -> Iterable[SpoiledPrompts]:
        """Clients that waste their cache, the worst first."""
        return sorted((one for one in self._spoiled.values() if one.num_requests), key=lambda one: -one.num_tokens)

    def _session_of(self, ended: EndedRequest) -> Session | None:
        """The request's session, which is the newest from here on; None: its prompt is too short to tell."""
        request, model = ended.request, ended.model
        if request.session_id:
            key = (request.tenant, model, request.session_id.encode())
            session = self._sessions.pop(key, None) or Session(
                tenant=request.tenant, model=model, name=request.session_id
            )
        else:
            if ended.num_prompt_tokens < MIN_TOKENS:
                return None
            digest, found = self._continued(ended)
            session = Session(tenant=request.tenant, model=model, name="") if found is None else self._take(found)
            key = (request.tenant, model, digest)
            if key in self._sessions:  # the same prompt again
                session = self._take(key)
            lengths = self._lengths.setdefault(key[:2], {})
            lengths[ended.num_prompt_tokens] = lengths.get(ended.num_prompt_tokens, 0) + 1
        self._sessions[key] = session
        while len(self._sessions) > MAX_SESSIONS:
            self._take(next(iter(self._sessions)))
        return session

    def _continued(self, ended: EndedRequest) -> tuple[bytes, tuple[str, str, bytes] | None]:
        """The digest of a prompt, and the key of the longest known prompt that it begins with. O(tokens)."""
        place = (ended.request.tenant, ended.model)
        tokens = memoryview(array("I", ended.request.prompt_token_ids)).cast("B")
        hashed, at = blake2b(ended.request.cache_salt.encode(), digest_size=16), 0
        found: tuple[str, str, bytes] | None = None
        for length in sorted(self._lengths.get(place, ())):
            if length > ended.num_prompt_tokens:
                break
            hashed.update(tokens[4 * at : 4 * length])
            at = length
            if (key := (*place, hashed.copy().digest())) in self._sessions:
                found = key
        hashed.update(tokens[4 * at :])
        return hashed.digest(), found

    def _take(self, key: tuple[str, str, bytes]) -> Session:
        """Takes a session out."""
        session = self._sessions.pop(key)
        if not session.name:
            lengths = self._lengths[key[:2]]
            lengths[session.num_prompt_tokens] -= 1
            if not lengths[session.num_prompt_tokens]:
                del lengths[session.num_prompt_tokens]
            if not lengths:
                del self._lengths[key[:2]]
        return session

    def _note_line(self, ended: EndedRequest, rule: str, line: str) -> None:
        tenant = ended.request.tenant
        known = self._spoiled.pop((tenant, rule), None) or SpoiledPrompts(tenant=tenant, rule=rule, line=line)
        if known.line != line:
            known.line = line
            known.num_requests += 1
            known.num_tokens += ended.num_prompt_tokens - ended.timeline.num_cached_tokens
        self._spoiled[tenant, rule] = known
        if len(self._spoiled) > MAX_CLIENTS:
            self._spoiled.popitem(last=False)


def prompt_speeds(replicas: Iterable[ReplicaLoad]) -> dict[str, float]:
    """Tokens of prompts that a replica computes in a second, by model: the best of its replicas."""
    speeds: dict[str, float] = {}
    for replica in replicas:
        if replica.stats is not None:
            speeds[replica.model] = max(speeds.get(replica.model, 0.0), replica.stats.prefill_tokens_per_s)
    return speeds


def saved_s(session: Session, tokens_per_s: Mapping[str, float]) -> float:
    """Estimated seconds of prefill that a session saved, by the measured speed of its model's replicas; 0: no
    measurement yet.
    """
    speed = tokens_per_s.get(session.model, 0.0)
    return session.num_saved_tokens / speed if speed else 0.0
