"""Block exchange of a replica: agrees with other replicas on transfers of blocks, over gRPC; the blocks themselves go
between ranks (`worker/engine/block_sockets.py`).

    asking replica ── SendBlocks(names) ──► sending replica        its engine copies them between two steps
                   ◄── addresses, key ─────                        each rank connects to its own address
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import grpc

from holdfast.v1 import engine_pb2, engine_pb2_grpc
from holdfast.worker.block_hash import HASH_BYTES
from holdfast.worker.engine.tier_mover import KV, NAME_BYTES
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.engine.transfer_shares import SendingReplica
from holdfast.worker.errors import HoldfastError, InvalidRequestError
from holdfast.worker.executors.block_layout import Heads
from holdfast.worker.replica.replica import Replica
from holdfast.worker.replica.transfer_terms import RefusedError, rank_messages, read_answer, read_ranks, refusal_of
from holdfast.worker.request import MAX_CACHE_TTL_S, BlockSource, PinnedPrefix
from holdfast.worker.wire.link_security import LinkSecurity
from holdfast.worker.wire.loopback import NO_PROXY

logger = logging.getLogger(__name__)

ASK_S: Final = 3.0
"""Seconds to wait for the other replica's answer: a step of its may have to end first."""
FIRST_ASKED_S: Final = 2.0
"""Seconds for which a draining replica waits for a request for its pinned prefixes: routers must notice the drain."""
STILL_S: Final = 1.5
"""And for so long after it was asked last."""
LOOK_S: Final = 0.1
MAX_CHANNELS: Final = 32  # gRPC channels kept open
MAX_LASTS_MS: Final = 60_000
MAX_BLOCKS: Final = 1 << 17


class BlockExchange:
    """Both ends of a replica's transfers. Lives on the event loop that made it."""

    def __init__(self, replica: Replica, security: LinkSecurity, host: str) -> None:
        """`host`: where the replica's link server listens."""
        self._replica = replica
        self._security = security
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[str] = set()
        self._asked_s = 0.0
        if replica.movers is not None:
            replica.movers.asker = self._ask

    async def close(self) -> None:
        """Ends open requests, and leaves the other replicas."""
        if self._replica.movers is not None:
            self._replica.movers.asker = None
        for task in self._tasks:
            task.cancel()
        for channel in self._channels.values():
            await channel.close(None)

    # --- the sending end ---

    async def offer(self, request: engine_pb2.SendBlocksRequest) -> engine_pb2.SendBlocksResponse:
        """Begins to send the requested blocks. A response without addresses has the reason."""
        names = _names(request.names)
        movers = self._replica.movers
        if movers is None:
            return engine_pb2.SendBlocksResponse(refusal="it sends no blocks")
        heads = read_ranks(request.heads)
        if reason := refusal_of(request, heads, self._replica.info, movers.own):
            return engine_pb2.SendBlocksResponse(refusal=reason)
        times = {"waits": request.as_computed, "is_leaving": request.is_leaving}
        begin = partial(self._begin, names, heads, request.lasts_ms / 1e3, **times)
        future = self._replica.engine.between_steps(begin)
        return await asyncio.wrap_future(future)

    def _begin(
        self, names: Sequence[bytes], heads: Sequence[Heads], lasts_s: float, *, waits: bool, is_leaving: bool
    ) -> engine_pb2.SendBlocksResponse:
        """On the engine's thread, between two steps."""
        movers, sendings = self._replica.movers, self._replica.engine.tier.sendings
        assert movers is not None, "it was looked at"
        if not sendings.has_room:
            return engine_pb2.SendBlocksResponse(refusal="it sends to too many replicas already")
        if not (found := names if waits else sendings.found(names)):
            return engine_pb2.SendBlocksResponse(refusal="it has evicted these blocks")
        addresses = movers.listen(self._host)
        if not addresses:
            return engine_pb2.SendBlocksResponse(refusal="it cannot listen")
        key = TransferKey.fresh(is_encrypted=self._security.tls is not None)
        number = sendings.begin(found, self._replica.engine.now(), lasts_s, waits=waits, is_leaving=is_leaving)
        self._loop.call_soon_threadsafe(self._note_asked)
        movers.offer(number, key, heads)
        return engine_pb2.SendBlocksResponse(
            transfer=key.transfer,
            key=key.key,
            is_encrypted=key.is_encrypted,
            addresses=[engine_pb2.RankAddress(host=host, port=port) for host, port in addresses],
            num_blocks=sum(name.startswith(KV) for name in found),
            heads=rank_messages(movers.own.share.heads),
        )

    def _note_asked(self) -> None:
        self._asked_s = max(self._asked_s, self._loop.time())

    async def pins(self, request: engine_pb2.GetPinsRequest) -> engine_pb2.GetPinsResponse:
        """Prefixes that are pinned here, for a replica that can take their blocks; for a router also those that lie on
        the disk alone.
        """
        if request.kind and (self._replica.movers is None or request.kind != self._pins_kind):
            return engine_pb2.GetPinsResponse()
        held = await asyncio.wrap_future(self._replica.engine.between_steps(self._replica.engine.tier.pinned_prefixes))
        answer, num_left = engine_pb2.GetPinsResponse(), MAX_BLOCKS
        for prefix in sorted(held, key=lambda one: -one.ttl_s):
            num_left -= len(prefix.hashes)
            if num_left >= 0:
                hashes, ttl_ms = b"".join(prefix.hashes), math.ceil(1e3 * prefix.ttl_s)
                answer.prefixes.add(tenant=prefix.tenant, ttl_ms=ttl_ms, hashes=hashes)
        if request.kind:
            self._note_asked()
        elif self._replica.movers is not None:
            in_memory = {one for prefix in held for one in prefix.hashes}
            kept = await asyncio.wrap_future(self._replica.movers.own.mover.kept_prefixes())
            for one in sorted(kept, key=lambda one: -one.ttl_s)[: max(0, num_left)]:
                if one.last_hash not in in_memory:
                    ttl_ms = math.ceil(1e3 * one.ttl_s)
                    answer.prefixes.add(
                        tenant=one.tenant, ttl_ms=ttl_ms, hashes=one.last_hash, num_blocks_on_disk=one.num_blocks
                    )
        return answer

    async def end_pins(self, request: engine_pb2.EndPinsRequest) -> engine_pb2.EndPinsResponse:
        """Ends pins on an operator's order."""
        if len(request.prefix) not in (0, HASH_BYTES):
            raise InvalidRequestError(
                "prefix", f"{len(request.prefix)} bytes", f"must have {HASH_BYTES} bytes, or none"
            )
        unpin = partial(self._replica.engine.tier.unpin, request.tenant, request.prefix)
        num_blocks = await asyncio.wrap_future(self._replica.engine.between_steps(unpin))
        logger.info("unpinned %d blocks of the tenant %r", num_blocks, request.tenant)
        return engine_pb2.EndPinsResponse(num_blocks=num_blocks)

    async def hand_pins_on(self, limit_s: float) -> None:
        """Waits until another replica has the prefixes that are pinned here, i.e. until none asks any longer; for this
        long at most.
        """
        engine, now = self._replica.engine, self._loop.time()
        if self._replica.movers is None or not engine.reported_stats.num_pinned_blocks:
            return
        first_s, ends_s = now + FIRST_ASKED_S, now + limit_s
        while now < ends_s and engine.failure is None:
            if now >= max(first_s, self._asked_s + STILL_S) and not engine.tier.sends_blocks:
                return
            await asyncio.sleep(LOOK_S)
            now = self._loop.time()

    # --- the asking end ---

    def take_pins(self, address: str) -> None:
        """A router says that the replica at this address leaves."""
        if self._replica.movers is not None and address not in self._leaving:
            self._leaving.add(address)
            self._keep(self._loop.create_task(self._take_pins(address)))

    async def _take_pins(self, address: str) -> None:
        try:
            stub: Any = engine_pb2_grpc.EngineStub(self._channel(address))  # type: ignore[no-untyped-call]
            request = engine_pb2.GetPinsRequest(kind=self._pins_kind)
            answer = await stub.GetPins(request, timeout=ASK_S, metadata=self._security.metadata())
            prefixes = [_prefix(one) for one in answer.prefixes]
            if prefixes:
                logger.info("takes over %d pinned prefixes of the replica at %s", len(prefixes), address)
                self._replica.engine.between_steps(lambda: self._replica.engine.tier.take_pins(prefixes, address))
        except (grpc.aio.AioRpcError, HoldfastError, RefusedError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.info("the replica at %s does not hand over its pinned prefixes: %s", address, reason)
        finally:
            self._leaving.discard(address)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ask(self, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int, lasts_s: float) -> None:
        """Requests blocks, from the engine's thread. The ticket gets the outcome in any case."""
        self._loop.call_soon_threadsafe(self._begin_asking, ticket, source, names, piece, lasts_s)

    def _begin_asking(
        self, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int, lasts_s: float
    ) -> None:
        self._keep(self._loop.create_task(self._ask_for(ticket, source, names, piece, lasts_s)))

    async def _ask_for(
        self, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int, lasts_s: float
    ) -> None:
        engine, movers = self._replica.engine, self._replica.movers
        assert movers is not None, "only a mover asks"
        share, block_size = movers.own.share, source.block_size or self._replica.info.block_size
        request = engine_pb2.SendBlocksRequest(
            kind=self._replica.info.transfer_kind(),
            names=b"".join(name for name in names if name.startswith(KV)),
            lasts_ms=min(MAX_LASTS_MS, round(1e3 * lasts_s)),
            as_computed=source.is_computing,
            is_leaving=source.is_leaving,
            block_size=block_size,
            numbers=share.layout.numbers,
            own_block_size=share.layout.block_size,
            heads=rank_messages(share.heads),
        )
        try:
            stub: Any = engine_pb2_grpc.EngineStub(self._channel(source.address))  # type: ignore[no-untyped-call]
            metadata = self._security.metadata()
            answer: engine_pb2.SendBlocksResponse = await stub.SendBlocks(request, timeout=ASK_S, metadata=metadata)
            key, there = read_answer(answer, source, share.heads, block_size)
            engine.between_steps(partial(self._receive, ticket, there, key, answer.num_blocks, piece))
        except (grpc.aio.AioRpcError, HoldfastError, RefusedError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.info("the replica at %s sends no blocks, and they are computed here: %s", source.address, reason)
            engine.tier.cut_restore(ticket)

    def _receive(self, ticket: int, there: SendingReplica, key: TransferKey, num_blocks: int, piece: int) -> None:
        """On the engine's thread, between two steps."""
        movers = self._replica.movers
        if movers is not None and (expected := self._replica.engine.tier.settle_restore(ticket, num_blocks)):
            movers.receive(ticket, there, key, expected, piece)

    @property
    def _pins_kind(self) -> bytes:
        """Kind of its blocks and of their tokens: of pinned prefixes there are hashes alone."""
        return self._replica.info.transfer_kind(self._replica.info.block_size)

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None)
        if channel is None:
            channel = self._security.channel(address, [NO_PROXY])
        self._channels[address] = channel
        if len(self._channels) > MAX_CHANNELS:
            _, oldest = self._channels.popitem(last=False)
            self._loop.create_task(oldest.close(ASK_S))
        return channel


def _names(packed: bytes) -> list[bytes]:
    """Names of blocks, one after the other. Raises `InvalidRequestError`."""
    count, rest = divmod(len(packed), NAME_BYTES)
    if rest or not 0 < count <= MAX_BLOCKS:
        limit = f"must be 1 to {MAX_BLOCKS} names of {NAME_BYTES} bytes each"
        raise InvalidRequestError("names", f"{len(packed)} bytes", limit)
    return [packed[first : first + NAME_BYTES] for first in range(0, len(packed), NAME_BYTES)]


def _prefix(message: engine_pb2.PinnedPrefix) -> PinnedPrefix:
    """A pinned prefix of another replica. Raises `RefusedError`."""
    packed = message.hashes
    if len(packed) % HASH_BYTES or len(packed) < 2 * HASH_BYTES:
        raise RefusedError("its answer cannot be read")
    hashes = tuple(packed[first : first + HASH_BYTES] for first in range(0, len(packed), HASH_BYTES))
    return PinnedPrefix(message.tenant, min(message.ttl_ms / 1e3, MAX_CACHE_TTL_S), hashes)
