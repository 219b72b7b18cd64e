"""Transfer terms: what two replicas tell each other of their blocks, and why one cannot take those of the other."""

from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from holdfast.v1 import engine_pb2
from holdfast.worker.engine.rank_orders import RankMover
from holdfast.worker.engine.transfer_key import KEY_BYTES, TRANSFER_BYTES, TransferKey
from holdfast.worker.engine.transfer_shares import SendingReplica
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.executors.block_layout import UNIT, Heads, mismatch
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import BlockSource


class RefusedError(Exception):
    """Another replica's blocks cannot be had, and why."""


def rank_messages(ranks: Iterable[Heads]) -> list[engine_pb2.RankHeads]:
    """The KV heads of a replica's ranks."""
    return [
        engine_pb2.RankHeads(counts=map(len, heads), heads=[head for layer in heads for head in layer])
        for heads in ranks
    ]


def read_ranks(messages: Iterable[engine_pb2.RankHeads]) -> list[Heads]:
    """The reverse of `rank_messages`. Raises `InvalidRequestError`."""
    ranks = []
    for message in messages:
        if sum(message.counts) != len(message.heads):
            limit = f"must be as many as the sum of its counts, {sum(message.counts)}"
            raise InvalidRequestError("heads", len(message.heads), limit)
        rest = iter(message.heads)
        ranks.append(tuple(tuple(sorted({next(rest) for _ in range(count)})) for count in message.counts))
    return ranks


def refusal_of(request: engine_pb2.SendBlocksRequest, heads: Sequence[Heads], info: ModelInfo, mover: RankMover) -> str:
    """Why this replica's blocks are of no use to the asking one, whose ranks have these heads; empty: they are."""
    layout, ours = mover.share.layout, mover.share.heads
    if request.numbers != layout.numbers:
        return f"it keeps keys and values as {layout.numbers}, and not as {request.numbers}"
    if request.kind != info.transfer_kind():
        return "its model, its release or what it has measured of its arithmetic is another"
    if request.block_size != layout.block_size:
        return f"its blocks have {layout.block_size} tokens, and were asked for as blocks of {request.block_size}"
    if request.own_block_size == layout.block_size and list(heads) == list(ours):
        return ""
    if mover.has_states:
        return "states go between replicas of equal ranks and block sizes alone"
    if not request.own_block_size or request.own_block_size % UNIT or layout.block_size % UNIT:
        return f"its blocks have {layout.block_size} tokens, which cannot become {request.own_block_size}"
    return mismatch(ours, heads)


def read_answer(
    answer: engine_pb2.SendBlocksResponse, source: BlockSource, heads: Sequence[Heads], block_size: int
) -> tuple[TransferKey, SendingReplica]:
    """The key of a transfer, and who sends it to ranks with these heads. A sender that listens everywhere is where its
    link is. Raises `RefusedError`.
    """
    if answer.refusal:
        raise RefusedError(answer.refusal)
    try:
        theirs = read_ranks(answer.heads)
        addresses = [(one.host, one.port) for one in answer.addresses]
        link_host = source.address.rpartition(":")[0].strip("[]")
        addresses = [(link_host if ip_address(host).is_unspecified else host, port) for host, port in addresses]
    except (ValueError, InvalidRequestError) as error:
        raise RefusedError(f"its answer cannot be read: {error}") from error
    sizes = len(answer.transfer), len(answer.key), len(addresses)
    if sizes != (TRANSFER_BYTES, KEY_BYTES, len(theirs)):
        raise RefusedError("its answer cannot be read")
    if reason := mismatch(theirs, heads):
        raise RefusedError(reason)
    key = TransferKey(answer.transfer, answer.key, answer.is_encrypted)
    return key, SendingReplica(addresses, theirs, block_size, source.is_computing)
