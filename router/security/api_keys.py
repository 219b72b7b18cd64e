"""API keys: what each may do, and the ring of them that a presented key is looked up in. Plain data, without IO.

A file holds the SHA-256 of each key and never a key. Keys have 256 random bits, so guessing is hopeless. A slow
hash such as scrypt would protect nothing, and would cost tens of milliseconds for every request, also of strangers.
"""

import hashlib
import hmac
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from holdfast.router.token_bucket import A_HAIR, TokenBucket
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.request import Priority

KEY_PREFIX: Final = "hfk_"
"""Prefix of keys, so that scanners of source code find a key that was committed by mistake."""

MAX_PRESENTED: Final = 1024
"""Longest text that is taken for a key."""


class ApiKey(BaseModel):
    """One key of the file: hash, name, tenant and rights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.@-]+$")
    """Name in lists and logs."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    tenant: str = Field("", max_length=128)
    """Tenant that its requests are charged to; empty: a tenant of the key's name."""
    models: tuple[str, ...] = ()
    """Models that it may use; empty: all."""
    requests_per_minute: float | None = Field(None, gt=0)
    tokens_per_minute: float | None = Field(None, gt=0)
    """Tokens of prompts and outputs together."""
    max_priority: Literal["critical", "high", "normal", "low"] = "normal"
    """The best class of service that it may ask for."""
    operator: bool = False
    """Whether it may see load, metrics and connections, of all tenants."""

    @field_validator("models", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @property
    def charged_tenant(self) -> str:
        return self.tenant or self.name

    @property
    def priority(self) -> Priority:
        return Priority[self.max_priority.upper()]


class KeyRing:
    """Keys by their hashes. Immutable."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        self._by_digest = {bytes.fromhex(key.sha256): key for key in self.keys}

    @classmethod
    def read(cls, text: str, source: str) -> "KeyRing":
        """The keys of a file's content. Raises `ConfigurationError`, whose message shows no hash."""
        try:
            content = json.loads(text)
            keys = [ApiKey.model_validate(entry) for entry in content["keys"]]
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "a key"
            raise ConfigurationError(f"security.api_keys: {source}: {field}: {first['msg']}") from None
        except (ValueError, TypeError, KeyError, RecursionError):
            message = 'must be a JSON object with a list "keys", as `holdfast keys add` writes it'
            raise ConfigurationError(f"security.api_keys: {source}: {message}") from None
        for names in ([key.name for key in keys], [key.sha256 for key in keys]):
            if len(set(names)) != len(names):
                raise ConfigurationError(f"security.api_keys: {source}: two keys have the same name or the same hash")
        return cls(keys)

    def written(self) -> str:
        """The keys as the content of a file."""
        entries = [key.model_dump(exclude_defaults=True) for key in self.keys]
        return json.dumps({"keys": entries}, indent=2) + "\n"

    def with_key(self, key: ApiKey) -> "KeyRing":
        """And one more. Raises `ConfigurationError` for a name that is there already."""
        if any(other.name == key.name for other in self.keys):
            raise ConfigurationError(f"name = {key.name!r}: there is a key of this name; revoke it first")
        return KeyRing((*self.keys, key))

    def without(self, name: str) -> "KeyRing":
        """The ring without one of its keys. Raises `ConfigurationError` for a name that is not there."""
        left = [key for key in self.keys if key.name != name]
        if len(left) == len(self.keys):
            known = ", ".join(key.name for key in self.keys) or "none"
            raise ConfigurationError(f"name = {name!r}: there is no key of this name; there are: {known}")
        return KeyRing(left)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented, or None.

        Every presented text is hashed once, looked up once by its whole hash, and compared once in constant time: the
        time of the look-up depends only on a hash, which a caller cannot steer.
        """
        digest = digest_of(presented)
        found = self._by_digest.get(digest)
        is_equal = hmac.compare_digest(digest, _NOBODY if found is None else bytes.fromhex(found.sha256))
        return found if is_equal else None


def digest_of(presented: str) -> bytes:
    """The hash by which a key is known. 32 bytes."""
    return hashlib.sha256(presented[:MAX_PRESENTED].encode(errors="surrogateescape")).digest()


_NOBODY: Final = bytes(32)
"""Compared with where there is no key: no text has this hash, as far as anybody knows."""


logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0


class KeyFile:
    """A `KeySource`. A file that cannot be read, or is half written, leaves the keys as they were; logged once."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """`clock` gives seconds. Raises `ConfigurationError` for a file that cannot be used."""
        self._path = path
        self._clock = clock
        self._content = _content(path)
        self._ring = _parsed(self._content, path)
        self._complaint = ""
        self._looked_at = clock()

    def ring(self) -> KeyRing:
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        return self._ring

    def _look(self) -> None:
        try:
            content = _content(self._path)
            if content != self._content:
                self._ring, self._content = _parsed(content, self._path), content
                logger.info("%s has changed: %d API keys", self._path, len(self._ring.keys))
        except ConfigurationError as error:
            if (complaint := str(error)) != self._complaint:
                self._complaint = complaint
                logger.error("the API keys stay as they were: %s", complaint)
        else:
            self._complaint = ""


def read_keys(path: Path) -> KeyRing:
    """Raises `ConfigurationError`."""
    return _parsed(_content(path), path)


def write_keys(path: Path, ring: KeyRing) -> None:
    """Writes the file in one piece, readable by this user alone: a reader at the same time sees the old keys or the new
    ones.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(ring.written())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"security.api_keys = {str(path)!r}: cannot be read ({error})") from None


def _parsed(content: bytes, path: Path) -> KeyRing:
    try:
        return KeyRing.read(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"security.api_keys = {str(path)!r}: cannot be read ({error})") from None


class Rates:
    """The buckets of one key."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None) -> None:
        self.limits = requests_per_minute, tokens_per_minute
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute / 60)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute / 60)

    def wait_s(self, now: float) -> tuple[float, str]:
        """Seconds until one more request may come, and the name of the rate that is used up; 0 if it may come now."""
        waits = [(0.0, "")]
        if self._requests is not None:
            waits.append((self._requests.wait_s(now, 1.0), "requests_per_minute"))
        if self._tokens is not None:
            waits.append((self._tokens.wait_s(now, 2 * A_HAIR), "tokens_per_minute"))
        return max(waits)

    def take_request(self, now: float) -> None:
        """Takes one request from the key's rate, even if it is used up; `now` in seconds."""
        if self._requests is not None:
            self._requests.take(1.0, now)

    def take_tokens(self, number: int, now: float) -> None:
        """Takes `number` tokens from the key's rate; `now` in seconds."""
        if self._tokens is not None:
            self._tokens.take(number, now)
