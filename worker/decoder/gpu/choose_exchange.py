"""Choice of the exchange between ranks at load: peers' memory where it works and gives the right bits, else NCCL.

What may live here: the check and the choice, with the reason for the log. What may not: the exchanges
(`rank_exchange.py`).
"""

import logging
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.decoder.gpu.buffers import Buffers
from holdfast.worker.decoder.gpu.launches import Launch, Launches
from holdfast.worker.decoder.gpu.peer_memory import PeerMemory, share_memory
from holdfast.worker.decoder.gpu.rank_exchange import (
    PROGRAMS,
    WORDS,
    GroupExchange,
    NoExchange,
    PeerExchange,
    RankExchange,
    share_words,
)
from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

Share = Callable[[TensorParallelGroup, int, torch.device], PeerMemory | str]
"""As `share_memory`."""

_ROUNDS: Final = 3
"""Of a check, so that both slots are used again."""


def choose_exchange(
    group: TensorParallelGroup,
    num_values: int,
    device: torch.device,
    launch: Launch,
    share: Share | None = None,
) -> RankExchange:
    """The exchange for sums of up to `num_values`. Larger ones go by way of the group.

    All ranks of the group call this together and come to the same answer. `share` is `share_memory` on CUDA devices;
    elsewhere ranks do not share memory without it. Raises `ReplicaError` if a rank is lost.
    """
    if group.size == 1:
        return NoExchange()
    launches = Launches(launch)
    others = GroupExchange(group, launches)
    if share is None and device.type == "cuda":
        share = share_memory
    if share is None:
        return others
    slot_words = -(-num_values // WORDS) * WORDS
    memory = share(group, share_words(slot_words), device)
    if isinstance(memory, str):
        logger.info("sums over ranks are gathered by the group, outside graphs: %s", memory)
        return others
    peers = PeerExchange(memory, group, slot_words, others, device, launch)
    difference = check(peers, others, group, num_values, device, launches)
    if difference is None:
        logger.info("sums over %d ranks are taken by kernels in peers' memory", group.size)
        return peers
    peers.close()
    logger.warning("sums over ranks are gathered by the group, outside graphs: %s", difference)
    return others


def check(
    peers: RankExchange,
    others: RankExchange,
    group: TensorParallelGroup,
    num_values: int,
    device: torch.device,
    launches: Launches,
) -> str | None:
    """How `peers` differs from `others` in the bits of sums and gathers of some sizes, on any rank; None: in none."""
    difference = None
    generator = torch.Generator().manual_seed(group.rank)
    for size in sorted({1, min(num_values, WORDS * PROGRAMS + 5), num_values}):
        for turn in range(_ROUNDS):
            x = (torch.randn(2, size, generator=generator) * 2.0 ** (8 * turn)).to(device)
            found = (_differing(peers, others, x, launches), _differing_words(peers, group, device))
            difference = difference or found[0] or found[1]  # after both: all ranks make all calls
    if (lost := peers.lost()) is not None:
        difference = lost
    fine = group.all_gather(torch.tensor([int(difference is None)]), dim=0)
    return None if bool(fine.all()) else difference or "another rank has found a difference"


def _differing(peers: RankExchange, others: RankExchange, x: Tensor, launches: Launches) -> str | None:
    """What differs of x [2, values], two slices of this rank."""
    ours, theirs = Buffers(x.device), Buffers(x.device)
    pairs = {
        "sums": (_sum(peers, x, ours, launches), _sum(others, x, theirs, launches)),
        "gathered values": (peers.gather(x[0], "x", ours), others.gather(x[0], "x", theirs)),
        "values at the leader": (peers.gather_to_leader(x, ours), others.gather_to_leader(x, theirs)),
    }
    for what, (one, other) in pairs.items():
        if one is not None and other is not None and not torch.equal(one, other):
            return f"{what} in peers' memory are not those of the group"
    return None


def _differing_words(peers: RankExchange, group: TensorParallelGroup, device: torch.device) -> str | None:
    expected = torch.arange(PROGRAMS, dtype=torch.int32, device=device)
    words = expected.clone() if group.rank == 0 else torch.zeros_like(expected)
    peers.take_from_leader(words)
    return None if torch.equal(words, expected) else "the leader's words do not arrive in peers' memory"


def _sum(exchange: RankExchange, x: Tensor, buffers: Buffers, launches: Launches) -> Tensor:
    """Of all slices of all ranks [1, values]."""
    parts = exchange.add(x[:, None], buffers)
    total = torch.empty_like(parts[0])
    launches.sum_parts(parts, total)
    return total
