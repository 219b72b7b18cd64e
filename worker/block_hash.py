"""Block hashes of the prefix cache: a chained hash of a full block's tokens, the same everywhere.

A block's hash covers its tokens and the hash of the block before it, so equal hashes mean the same tokens after the
same prefix, of the same tenant and under the same salt. Workers cache blocks by it, and routers look prefixes up by it.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

HASH_BYTES: Final = 16

_EMPTY: Final = blake2b(digest_size=HASH_BYTES)
"""Copied for each block: to make one by its arguments takes as long as to hash a block."""

_SHORT: Final = struct.Struct("<Q")


@lru_cache(maxsize=256)
def root_hash(salt: str, tenant: str = "", adapter: str = "") -> bytes:
    """The parent of every first block of a tenant under this salt, with the adapter of this digest. Blocks of different
    tenants, under different salts or with different adapters are never found for each other.
    """
    key = blake2b(_bytes(tenant), digest_size=HASH_BYTES).digest() if tenant else b""
    root = blake2b(_bytes(salt), digest_size=HASH_BYTES, key=key).digest()
    return blake2b(root + _bytes(adapter), digest_size=HASH_BYTES, person=b"adapter").digest() if adapter else root


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def next_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block that follows the block `parent`."""
    hasher = _EMPTY.copy()
    hasher.update(parent + _tokens(len(token_ids)).pack(*token_ids))
    return hasher.digest()


class HashChain:
    """The hashes of one sequence's full blocks. Each is computed once, at its first use."""

    __slots__ = ("_hashes",)

    def __init__(self, salt: str, tenant: str = "", adapter: str = "") -> None:
        self._hashes = [root_hash(salt, tenant, adapter)]

    @classmethod
    def known(cls, hashes: Iterable[bytes]) -> "HashChain":
        """The chain of blocks whose tokens are not known here; the first of these hashes is the root's."""
        chain = cls("")
        chain._hashes = [*hashes]
        return chain

    def hash_of(self, index: int, token_ids: Sequence[int], block_size: int) -> bytes:
        """Hash of block number `index`, -1 for the root. `token_ids` are all of the sequence's, and fill that block."""
        while len(self._hashes) < index + 2:
            start = (len(self._hashes) - 1) * block_size
            self._hashes.append(next_hash(self._hashes[-1], token_ids[start : start + block_size]))
        return self._hashes[index + 1]


def short_hash(block_hash: bytes) -> int:
    """The first 64 bits, which are sent over the wire. For advice alone, where a false match costs time and not
    tokens.
    """
    number: int = _SHORT.unpack_from(block_hash)[0]
    return number


_ALL_BITS = 2**64 - 1


def short_snapshot(short: int) -> int:
    """Stands for a snapshot of the state behind a block, by the block's short hash: the other bits."""
    return short ^ _ALL_BITS


def short_adapter(digest: str) -> int:
    """Stands for a resident adapter of this digest, among the short hashes of blocks: its root, which is no block's."""
    return short_hash(root_hash("", "", digest))


def short_hashes(root: bytes, token_ids: Sequence[int], block_size: int, num_blocks: int) -> Iterator[int]:
    """The short hashes of a prompt's first blocks, which are full, behind a `root_hash`; each is computed on demand.

    They are `next_hash` and `short_hash`, without the calls: a router makes all of them for each request.
    """
    fresh, pack, short = _EMPTY.copy, _tokens(block_size).pack, _SHORT.unpack_from
    parent = root
    for start in range(0, num_blocks * block_size, block_size):
        hasher = fresh()
        hasher.update(parent + pack(*token_ids[start : start + block_size]))
        parent = hasher.digest()
        yield short(parent)[0]


@lru_cache(maxsize=64)
def _tokens(num_tokens: int) -> struct.Struct:
    """Packer of `num_tokens` token ids."""
    return struct.Struct(f"<{num_tokens}I")
