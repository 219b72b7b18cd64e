"""The prefix-aware decision against brute force: each replica's cache as a set, and every estimate written out."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.policy import COPY_COST, MAX_COPY_TOKENS, TOKENS_PER_SEQUENCE, UNKNOWN_TOKEN_S
from holdfast.router.dispatch.replica_registry import ReplicaRegistry
from holdfast.router.dispatch.request_state import RequestState
from holdfast.worker.adapter import Adapter
from holdfast.worker.block_hash import HashChain, short_adapter, short_hash
from holdfast.worker.request import EngineLoad, EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from tests.router.core import LetterText, facts

MODEL = facts("a").model
PROMPT = tuple(range(25))
CACHE = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 5))), max_size=4)
"""Batches of blocks that are stored or evicted."""
REPLICA = st.tuples(
    st.sampled_from([4, 8]),  # block size
    CACHE,
    st.integers(0, 12),  # running
    st.sampled_from([None, 100.0, 1000.0]),  # prompt tokens a second
    st.booleans(),  # the adapter is resident
    st.booleans(),  # retiring
)


def block(number: int, block_size: int, adapter: str) -> int:
    return short_hash(HashChain("", adapter=adapter).hash_of(number, PROMPT, block_size))


def num_cached(cache: set[int], block_size: int) -> int:
    """Leading tokens, by the definition."""
    number = 0
    while block_size * (number + 1) < len(PROMPT) and number in cache:
        number += 1
    return number * block_size


class Brute:
    """All replicas as plain columns."""

    def __init__(self, replicas, adapter_s: float | None) -> None:
        """`adapter_s`: seconds that the request's adapter takes to load; None: it has none."""
        measured = [speed for *_, speed, _, _ in replicas if speed]
        typical = 1 / measured[-1] if measured else UNKNOWN_TOKEN_S
        self.cached, self.scores, self.token_s = [], [], []
        self.load_s = [0.0 if adapter_s is None or is_resident else adapter_s for *_, is_resident, _ in replicas]
        self.residents = [slot for slot, one in enumerate(replicas) if one[-2] and adapter_s is not None]
        for block_size, batches, num_running, speed, *_ in replicas:
            cache: set[int] = set()
            for is_stored, numbers in batches:
                cache = cache | numbers if is_stored else cache - numbers
            self.cached.append(num_cached(cache, block_size))
            self.scores.append(num_running)
            self.token_s.append(1 / speed if speed else typical)
        self.open = [slot for slot, one in enumerate(replicas) if not one[-1]]

    def seconds(self, slot: int) -> float:
        num_new = len(PROMPT) - self.cached[slot]
        return (self.scores[slot] * TOKENS_PER_SEQUENCE + num_new) * self.token_s[slot] + self.load_s[slot]

    def choices(self) -> set[int]:
        """What may be chosen, whatever is drawn."""
        found = set()
        pairs = [(one, two) for one in self.open for two in self.open if one != two] or [(self.open[0],) * 2]
        longest = max(self.cached[slot] for slot in self.open)
        holders = [slot for slot in self.open if self.cached[slot] == longest] if longest else []
        residents = [slot for slot in self.residents if slot in self.open]
        drawn, resident = self.less_loaded(holders), self.less_loaded(residents)
        both = [min(one, two, key=lambda slot: (self.seconds(slot), slot)) for one in drawn for two in resident]
        for pair in pairs:
            other = min(pair, key=self.seconds)
            other_s = self.seconds(other)
            if self.cached[other] < longest:
                cost = min(MAX_COPY_TOKENS, COPY_COST * (longest - self.cached[other]))
                other_s += cost * self.token_s[other]
            if self.residents and other not in self.residents:
                other_s += self.load_s[other]
            kept = both or drawn or resident
            found |= {holder if self.seconds(holder) <= other_s else other for holder in kept or [other]}
        return found

    def less_loaded(self, slots: list[int]) -> list[int]:
        """Of each two."""
        return [min(one, two, key=self.scores.__getitem__) for one in slots for two in slots]


@given(
    replicas=st.lists(REPLICA, min_size=1, max_size=6),
    adapter_s=st.sampled_from([None, 0.01, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_every_decision_is_one_of_brute_force(replicas, adapter_s, seed):
    adapter = None if adapter_s is None else Adapter("poems", "0" * 64, "folder")
    # Blocks of another adapter's chain would be other ones: here the chain is the request's.
    rng, brute = random.Random(seed), Brute(replicas, adapter_s)
    registry = ReplicaRegistry(RouterConfig(routing_policy="prefix_aware"), rng.randrange)
    load = EngineLoad(num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=1, num_total_blocks=1)
    digest = "" if adapter is None else adapter.digest
    for slot, (block_size, batches, num_running, speed, is_resident, is_retiring) in enumerate(replicas):
        registry.add(
            replace(facts(f"replica-{slot}"), block_size=block_size), replace(load, num_running=num_running), 0
        )
        replica = registry.get(f"replica-{slot}")
        assert replica is not None
        for is_stored, numbers in batches:
            fitting = [number for number in sorted(numbers) if block_size * (number + 1) <= len(PROMPT)]
            blocks = [block(number, block_size, digest) for number in fitting]
            replica.cached.apply(*((blocks, ()) if is_stored else ((), blocks)))
        if speed:
            registry._models[MODEL].table.set_speed(slot, speed)
        if is_resident:
            replica.cached.apply([short_adapter("0" * 64)], ())
        registry.retire(replica, is_retiring)
    if adapter_s is not None:
        registry._models[MODEL].table.adapter_s = adapter_s
    params = SamplingParams(seed=1)
    request = EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params, adapter=adapter)

    def chosen() -> str | None:
        found = registry.choose(RequestState(request=request, model=MODEL, text=LetterText()))
        return found and found.facts.replica_id

    if not brute.open:
        assert chosen() is None
        return
    made = {chosen() for _ in range(40)}
    assert made <= {f"replica-{slot}" for slot in brute.choices()}
