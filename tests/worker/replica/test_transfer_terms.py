"""What two replicas tell each other of their blocks: read as it was said, or refused with the reason."""

from dataclasses import replace

import pytest

from holdfast.v1 import engine_pb2
from holdfast.worker.engine.transfer_shares import SendingReplica
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.executors.block_layout import Heads
from holdfast.worker.replica.transfer_terms import RefusedError, rank_messages, read_answer, read_ranks
from holdfast.worker.request import BlockSource
from tests.router.core import facts

RANKS: list[Heads] = [((0, 1), (0,)), ((2, 3), (0,)), ((4,), ())]
SOURCE = BlockSource("host:7", 640, is_computing=True)


def answer(heads: list[Heads] = RANKS, **changes: object) -> engine_pb2.SendBlocksResponse:
    addresses = [engine_pb2.RankAddress(host=f"10.0.0.{rank}", port=rank) for rank in range(3)]
    fields = {"transfer": b"t" * 16, "key": b"k" * 32, "addresses": addresses, "heads": rank_messages(heads)}
    return engine_pb2.SendBlocksResponse(**{**fields, **changes})


def test_heads_are_read_as_they_were_said():
    assert read_ranks(rank_messages(RANKS)) == RANKS
    assert read_ranks([]) == []


def test_heads_that_are_not_as_many_as_was_said_are_refused():
    with pytest.raises(InvalidRequestError, match="must be as many as the sum of its counts, 2"):
        read_ranks([engine_pb2.RankHeads(counts=[1, 1], heads=[3])])


def test_an_answer_tells_who_sends():
    key, there = read_answer(answer(is_encrypted=True), SOURCE, [((0, 1, 2, 3, 4), (0,))], 32)
    assert (key.transfer, key.key, key.is_encrypted) == (b"t" * 16, b"k" * 32, True)
    assert there == SendingReplica([(f"10.0.0.{rank}", rank) for rank in range(3)], RANKS, 32, is_computing=True)


def test_who_listens_everywhere_is_where_its_link_is():
    addresses = [engine_pb2.RankAddress(host="0.0.0.0", port=5)] * 3
    assert read_answer(answer(addresses=addresses), SOURCE, RANKS, 16)[1].addresses == [("host", 5)] * 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"refusal": "it sends no blocks"}, "it sends no blocks"),
        ({"transfer": b""}, "its answer cannot be read"),
        ({"key": b"short"}, "its answer cannot be read"),
        ({"heads": RANKS[:2]}, "its answer cannot be read"),
        ({"heads": [RANKS[0], RANKS[1], RANKS[1]]}, "its ranks have other KV heads"),
        (
            {"addresses": [engine_pb2.RankAddress(host="a host", port=1)] * 3},
            "its answer cannot be read: 'a host' does",
        ),
    ],
)
def test_an_answer_that_is_of_no_use_is_refused_with_the_reason(changes, reason):
    heads = changes.pop("heads", RANKS) if "heads" in changes else RANKS
    with pytest.raises(RefusedError, match=f"^{reason}"):
        read_answer(answer(heads, **changes), SOURCE, RANKS, 16)


def test_the_kind_of_keys_and_values_does_not_depend_on_ranks_and_blocks_where_a_known_answer_says_so():
    one = facts(answers_digest=b"four", tensor_parallel_size=1, block_size=16)
    other = replace(one, tensor_parallel_size=2, block_size=32)
    assert one.transfer_kind() == other.transfer_kind()
    assert one.transfer_kind(16) != other.transfer_kind(32)
    assert one.kv_version == other.kv_version == one.version != other.version
    for changes in ({"answers_digest": b""}, {"row_invariant": False}):
        first, second = replace(one, **changes), replace(other, **changes)
        assert first.transfer_kind() != second.transfer_kind()
        assert first.kv_version != second.kv_version
        assert first.transfer_kind() == replace(first, block_size=32).transfer_kind()
    for changes in ({"answers_digest": b"five"}, {"release": "2"}, {"dtype": "float16"}, {"max_model_len": 1}):
        assert replace(one, **changes).transfer_kind() != one.transfer_kind(), changes
