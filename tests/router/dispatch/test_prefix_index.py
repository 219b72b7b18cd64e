"""The router's index finds what the worker's cache would find, and hashes no further than it has to."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.dispatch.prefix_index import PrefixHolders, PrefixIndex, PromptPrefix
from holdfast.worker import block_hash
from holdfast.worker.block_hash import HashChain, short_hash
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams

BLOCK_SIZE = 4


def prefix(*token_ids: int, salt: str = "") -> PromptPrefix:
    params = SamplingParams(seed=1)
    return PromptPrefix(
        EngineRequest(request_id="r", prompt_token_ids=token_ids, sampling_params=params, cache_salt=salt)
    )


def blocks(*token_ids: int, salt: str = "") -> list[int]:
    """As the worker's cache knows them."""
    chain = HashChain(salt)
    return [short_hash(chain.hash_of(i, token_ids, BLOCK_SIZE)) for i in range(len(token_ids) // BLOCK_SIZE)]


def index_of(*hashes: int) -> PrefixIndex:
    index = PrefixIndex(BLOCK_SIZE, PrefixHolders(), 0)
    index.apply(hashes, ())
    return index


def test_leading_blocks_count_up_to_the_first_that_is_missing():
    hashes = blocks(*range(16))
    prompt = prefix(*range(16), 99)
    assert index_of().num_cached_tokens(prompt) == 0
    assert index_of(*hashes).num_cached_tokens(prompt) == 16
    assert index_of(*hashes[:2], hashes[3]).num_cached_tokens(prompt) == 8
    assert index_of(*hashes[1:]).num_cached_tokens(prompt) == 0


def test_the_last_token_is_computed_in_any_case():
    assert index_of(*blocks(*range(8))).num_cached_tokens(prefix(*range(8))) == 4
    assert index_of(*blocks(*range(8))).num_cached_tokens(prefix(*range(9))) == 8


def test_salts_keep_prompts_apart():
    index = index_of(*blocks(*range(8), salt="tenant"))
    assert index.num_cached_tokens(prefix(*range(9))) == 0
    assert index.num_cached_tokens(prefix(*range(9), salt="tenant")) == 8


def test_what_was_evicted_is_not_found_any_more():
    index = index_of(*blocks(*range(8)))
    index.apply((), blocks(*range(8))[1:])
    assert index.num_cached_tokens(prefix(*range(9))) == 4
    assert len(index) == 1


def test_replicas_may_differ_in_block_size():
    large = PrefixIndex(8, PrefixHolders(), 0)
    large.apply([short_hash(HashChain("").hash_of(0, range(8), 8))], ())
    prompt = prefix(*range(9))
    assert [large.num_cached_tokens(prompt), index_of(*blocks(*range(4))).num_cached_tokens(prompt)] == [8, 4]


def test_a_block_is_hashed_once_and_only_if_all_before_it_are_cached(monkeypatch: pytest.MonkeyPatch):
    hashed: list[int] = []

    class Counted:
        def copy(self) -> "hashlib.blake2b":
            hashed.append(1)
            return hashlib.blake2b(digest_size=block_hash.HASH_BYTES)

    known, strange = index_of(*blocks(*range(8))), index_of(1)
    monkeypatch.setattr(block_hash, "_EMPTY", Counted())
    prompt = prefix(*range(400))
    for _ in range(3):
        assert strange.num_cached_tokens(prompt) == 0
    assert len(hashed) == 1
    assert known.num_cached_tokens(prompt) == 8
    assert len(hashed) == 3, "two that are cached, one that is not"


CACHE = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12)
"""Blocks of one prompt that a replica stores and evicts."""


@given(caches=st.lists(st.tuples(CACHE, st.sampled_from([4, 8]), st.booleans()), min_size=1, max_size=6))
def test_the_holders_of_a_prompt_are_what_each_index_says(caches):
    """Replicas that differ in block size, some of them lost again."""
    holders, prompt, kept = PrefixHolders(), prefix(*range(25)), {}
    for slot, (events, block_size, is_lost) in enumerate(caches):
        index = PrefixIndex(block_size, holders, slot)
        for number, is_stored in events:
            block = list(prompt.blocks(block_size))[number : number + 1]
            index.apply(*((block, ()) if is_stored else ((), block)))
        if is_lost:
            index.close()
        else:
            kept[slot] = index
    match = holders.match(prompt)
    lengths = [num_tokens for num_tokens, _ in match.holders]
    assert lengths == sorted(lengths, reverse=True)
    for slot in range(len(caches)):
        assert match.num_cached(slot) == (kept[slot].num_cached_tokens(prompt) if slot in kept else 0)
    for index in kept.values():
        index.close()
    assert not holders.match(prompt).holders


def test_of_sets_of_holders_that_overlap_each_block_narrows_the_one_before():
    holders, prompt = PrefixHolders(), prefix(*range(25))
    own = list(prompt.blocks(BLOCK_SIZE))
    for slot, numbers in enumerate([(0, 1, 2), (0, 1), (1, 2), (0, 2)]):
        PrefixIndex(BLOCK_SIZE, holders, slot).apply([own[number] for number in numbers], ())
    assert holders.match(prompt).holders == ((12, 0b0001), (8, 0b0011), (4, 0b1011))
