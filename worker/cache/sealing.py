"""Sealing of blocks: the digest that every block is stored with, and encryption where a key is given.

A seal covers the block's name too, so that a block is never taken for another. Without a key it is a hash, which
detects damage, not forgery. With one, blocks are encrypted by AES-256-GCM, whose tag is the digest, and names, which
are hashes of tokens that one could guess, by one block of AES each.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from holdfast.worker.errors import ConfigurationError

DIGEST_BYTES: Final = 16
_NONCE_BYTES: Final = 12
MAX_OVERHEAD: Final = _NONCE_BYTES + DIGEST_BYTES
"""Bytes of a record besides its block, at most."""
KEY_BYTES: Final = 32
KIND_BYTES: Final = 1
"""A name begins with a byte for its kind; the hash after it has the size of a block of AES."""


class WrongDigestError(Exception):
    """A block differs from the one that was stored, or sent."""

    def __str__(self) -> str:
        return "a block has a wrong digest"


class Sealer:
    """Digests alone: 128-bit XXH3 of the block, seeded with 64-bit XXH3 of its name. It takes a third of the time of
    SHA-256, and a copy can take it on its way.
    """

    kind: bytes = b"XXH3 seeded by name"
    """Part of the blocks' kind, so that blocks with another seal are not found."""
    before: int = 0
    """Bytes of a record before its block."""
    overhead: int = DIGEST_BYTES
    """Bytes of a record besides its block."""

    @classmethod
    def seeds(cls, names: Sequence[bytes]) -> list[int] | None:
        """Seeds by which a copy of these blocks can take their digests, which follow them; None: it cannot."""
        return [xxh3_64_intdigest(name) for name in names]

    def hidden(self, names: Sequence[bytes]) -> list[bytes]:
        """Names as they are on the disk."""
        return list(names)

    def shown(self, hidden: Sequence[bytes]) -> list[bytes]:
        """The names that `hidden` were made of."""
        return list(hidden)

    def seal(self, name: bytes, data: memoryview) -> Sequence[memoryview | bytes]:
        """Stored form of the data, in parts."""
        return data, _digest(name, data)

    def seal_in_place(self, name: bytes, record: memoryview) -> None:
        """Completes a record in which the data is at its place already."""
        record[-DIGEST_BYTES:] = _digest(name, record[:-DIGEST_BYTES])

    def unseal(self, name: bytes, record: memoryview) -> memoryview:
        """The block: a part of the record, which is decrypted in place if it can be written to. Raises
        `WrongDigestError`.
        """
        data = record[:-DIGEST_BYTES]
        if _digest(name, data) != record[-DIGEST_BYTES:]:
            raise WrongDigestError
        return data


class KeySealer(Sealer):
    """Encryption by a key of 32 bytes."""

    before = _NONCE_BYTES
    overhead = MAX_OVERHEAD

    def __init__(self, key: bytes) -> None:
        """Raises `ConfigurationError` where the package `cryptography` is not installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.ciphers.algorithms import AES
            from cryptography.hazmat.primitives.ciphers.modes import ECB
        except ImportError as error:
            raise ConfigurationError(
                "cache.kv_offload_key_file: needs the package cryptography; install holdfast[encryption]"
            ) from error
        self._invalid = InvalidTag
        self._blocks = AESGCM(_subkey(key, b"blocks"))
        self._names = Cipher(AES(_subkey(key, b"names")), ECB())
        self.kind = _subkey(key, b"kind")

    @classmethod
    def seeds(cls, names: Sequence[bytes]) -> list[int] | None:
        return None

    def hidden(self, names: Sequence[bytes]) -> list[bytes]:
        encryptor = self._names.encryptor()
        return [name[:KIND_BYTES] + encryptor.update(name[KIND_BYTES:]) for name in names]

    def shown(self, hidden: Sequence[bytes]) -> list[bytes]:
        decryptor = self._names.decryptor()
        return [name[:KIND_BYTES] + decryptor.update(name[KIND_BYTES:]) for name in hidden]

    def seal(self, name: bytes, data: memoryview) -> Sequence[memoryview | bytes]:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce, self._blocks.encrypt(nonce, data, name)

    def seal_in_place(self, name: bytes, record: memoryview) -> None:
        record[:_NONCE_BYTES] = nonce = os.urandom(_NONCE_BYTES)
        self._blocks.encrypt_into(nonce, record[_NONCE_BYTES:-DIGEST_BYTES], name, record[_NONCE_BYTES:])

    def unseal(self, name: bytes, record: memoryview) -> memoryview:
        data = record[_NONCE_BYTES:-DIGEST_BYTES]
        try:
            if record.readonly:
                return memoryview(self._blocks.decrypt(record[:_NONCE_BYTES], record[_NONCE_BYTES:], name))
            self._blocks.decrypt_into(record[:_NONCE_BYTES], record[_NONCE_BYTES:], name, data)
            return data
        except (self._invalid, ValueError) as error:  # the latter: cut off
            raise WrongDigestError from error


def sealer_of(key_file: str | None) -> Sealer:
    """The sealer of a setting. Raises `ConfigurationError` unless the file has 32 bytes, or 64 hexadecimal digits."""
    if key_file is None:
        return Sealer()
    try:
        found = Path(key_file).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cache.kv_offload_key_file = {key_file!r}: {error.strerror}") from error
    if len(found) != KEY_BYTES:
        try:
            found = bytes.fromhex(found.decode().strip())
        except ValueError:
            found = b""
    if len(found) != KEY_BYTES:
        raise ConfigurationError(
            f"cache.kv_offload_key_file = {key_file!r}: must have {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal "
            "digits, as of `openssl rand -hex 32`"
        )
    return KeySealer(found)


def _subkey(key: bytes, purpose: bytes) -> bytes:
    return blake2b(purpose, key=key, digest_size=KEY_BYTES).digest()


def _digest(name: bytes, data: memoryview) -> bytes:
    return xxh3_128_digest(data, xxh3_64_intdigest(name))
