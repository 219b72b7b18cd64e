"""Pins of all replicas: lists the prefixes that they keep, and ends pins, on an operator's order."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from holdfast.router.links.replica_link import ReplicaLink
from holdfast.v1 import engine_pb2
from holdfast.worker.block_hash import HASH_BYTES
from holdfast.worker.errors import InvalidRequestError, ReplicaError


class ListedPin(NamedTuple):
    """Prefix that one replica keeps."""

    replica_id: str
    model: str
    tenant: str
    prefix: str
    """Hash of the last block, in hexadecimal digits."""
    num_tokens: int
    seconds_left: float
    is_on_disk: bool
    """Whether it lies on the disk of the replica's host alone."""


class UnheardReplica(NamedTuple):
    """Replica that has not answered."""

    replica_id: str
    reason: str


class ReplicaPins:
    """Asks the replicas that one router is linked to."""

    def __init__(self, links: Callable[[], Collection[ReplicaLink]]) -> None:
        """`links`: of all replicas."""
        self._links = links

    async def listed(self) -> tuple[list[ListedPin], list[UnheardReplica]]:
        """Pinned prefixes, by replica, and the replicas that have not answered. A prefix on a disk that several
        replicas share, or that another one has in memory, is listed once.
        """
        answers, unheard = await self._ask_all("GetPins", engine_pb2.GetPinsRequest())
        found = [_listed(link, one) for link, answer in answers for one in answer.prefixes]
        seen = {(one.model, one.tenant, one.prefix) for one in found if not one.is_on_disk}
        listed = []
        for one in found:
            key = (one.model, one.tenant, one.prefix)
            if not one.is_on_disk or key not in seen:
                listed.append(one)
                seen.add(key)
        return listed, unheard

    async def unpin(self, tenant: str, prefix: str = "") -> tuple[int, list[UnheardReplica]]:
        """Ends the tenant's pin of a prefix, or all of its pins without one. The number of blocks that were pinned, and
        the replicas that have not answered. Raises `InvalidRequestError`.
        """
        request = engine_pb2.EndPinsRequest(tenant=tenant, prefix=_hash(prefix))
        answers, unheard = await self._ask_all("EndPins", request)
        return sum(answer.num_blocks for _, answer in answers), unheard

    async def _ask_all(self, method: str, request: Any) -> tuple[list[tuple[ReplicaLink, Any]], list[UnheardReplica]]:
        links = sorted(self._links(), key=lambda link: link.endpoint.replica_id)
        found = await asyncio.gather(*(_ask(link, method, request) for link in links))
        answers = [(link, one) for link, one in zip(links, found, strict=True) if not isinstance(one, UnheardReplica)]
        return answers, [one for one in found if isinstance(one, UnheardReplica)]


async def _ask(link: ReplicaLink, method: str, request: Any) -> Any:
    try:
        return await link.ask(method, request)
    except ReplicaError as error:
        return UnheardReplica(link.endpoint.replica_id, str(error))


def _listed(link: ReplicaLink, pin: engine_pb2.PinnedPrefix) -> ListedPin:
    num_blocks = pin.num_blocks_on_disk or len(pin.hashes) // HASH_BYTES - 1  # the first hash is the root's
    prefix = pin.hashes[-HASH_BYTES:].hex()
    num_tokens = num_blocks * link.block_size
    endpoint = link.endpoint
    is_on_disk = pin.num_blocks_on_disk > 0
    return ListedPin(endpoint.replica_id, endpoint.model, pin.tenant, prefix, num_tokens, pin.ttl_ms / 1e3, is_on_disk)


_LIMIT: Final = f"must be a prefix as the list of pins names it, {2 * HASH_BYTES} hexadecimal digits"


def _hash(prefix: str) -> bytes:
    """Raises `InvalidRequestError`."""
    try:
        found = bytes.fromhex(prefix)
    except ValueError:
        raise InvalidRequestError("prefix", prefix, _LIMIT) from None
    if len(found) not in (0, HASH_BYTES):
        raise InvalidRequestError("prefix", prefix, _LIMIT)
    return found
