"""Block hashes of the prefix cache: a chained hash of a full block's tokens, the same everywhere.

A block's hash covers its tokens and the hash of the block before it, so equal hashes mean the same tokens after the
same prefix under the same salt. Workers cache blocks by it, and routers look prefixes up by it. What may not live here:
which block is cached where.
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

HASH_BYTES: Final = 16
_SHORT_BYTES: Final = 8


def root_hash(salt: str) -> bytes:
    """The parent of every first block under this salt. Blocks under different salts are never found for each other."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=HASH_BYTES).digest()


def next_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block that follows the block `parent`."""
    return blake2b(parent + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=HASH_BYTES).digest()


def short_hash(block_hash: bytes) -> int:
    """The first 64 bits: what goes over the wire. For advice alone, where a false match costs time and not tokens."""
    return int.from_bytes(block_hash[:_SHORT_BYTES], "little")


def short_hashes(salt: str, token_ids: Sequence[int], block_size: int, num_blocks: int) -> Iterator[int]:
    """The short hashes of a prompt's first blocks, which are full; each is worked out when it is asked for."""
    parent, pack = root_hash(salt), struct.Struct(f"<{block_size}I").pack
    for start in range(0, num_blocks * block_size, block_size):  # `next_hash`, without a call and a format for each
        block = pack(*token_ids[start : start + block_size])
        parent = blake2b(parent + block, digest_size=HASH_BYTES).digest()
        yield int.from_bytes(parent[:_SHORT_BYTES], "little")


class HashChain:
    """The hashes of one sequence's full blocks. Each is worked out once, when it is first asked for."""

    __slots__ = ("_hashes",)

    def __init__(self, salt: str) -> None:
        self._hashes = [root_hash(salt)]

    def hash_of(self, index: int, token_ids: Sequence[int], block_size: int) -> bytes:
        """Hash of block number `index`, -1 for the root. `token_ids` are all of the sequence's, and fill that block."""
        while len(self._hashes) < index + 2:
            start = (len(self._hashes) - 1) * block_size
            self._hashes.append(next_hash(self._hashes[-1], token_ids[start : start + block_size]))
        return self._hashes[index + 1]
