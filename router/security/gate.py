"""Gate of a router: authenticates callers and knows their rights. Every API calls it once for each request. A core
without IO.

An API passes the presented credentials (`enter`); from there on the caller is a context variable of the request's task,
and code that opens requests reads it again (`caller`): an API that forgot to ask lets no request in.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from holdfast.router.request import GenerationRequest
from holdfast.router.security.api_keys import ApiKey, KeyRing, Rates, digest_of
from holdfast.worker.errors import AuthenticationError, PermissionDeniedError, RateLimitError
from holdfast.worker.request import Priority

UNKNOWN: Final = "no valid API key was sent; send one as `authorization: Bearer KEY`"
"""The same for a missing key, a malformed one, a revoked one, and an unknown one."""

CLUSTER: Final = "cluster"
"""The name of the caller that presents the cluster's own token: routers, replicas and the command that started them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Identity and limits of a request's sender."""

    name: str = ""
    tenant: str | None = None
    """Tenant that its requests are charged to; None: the model that they name."""
    models: frozenset[str] | None = None
    """None: all."""
    max_priority: Priority = Priority.CRITICAL
    is_operator: bool = True
    rates: Rates | None = field(default=None, repr=False)
    has_paid: bool = False
    """Whether its request was admitted and charged to the request rate before; tokens are still charged."""

    def check_model(self, model: str) -> None:
        """Raises `PermissionDeniedError`. An empty name is the name of the only model that it may use."""
        if model and self.models is not None and model not in self.models:
            raise PermissionDeniedError("model", f"the key {self.name!r} may not use the model {model!r}")

    def check_operator(self) -> None:
        """Raises `PermissionDeniedError` for a key that is not an operator's."""
        if not self.is_operator:
            raise PermissionDeniedError("operator", f"the key {self.name!r} is not an operator's")

    def charged(self, request: GenerationRequest, now: float) -> GenerationRequest:
        """The request with the tenant that it is charged to. Takes it off the rate of requests.

        Raises `PermissionDeniedError`, `RateLimitError`.
        """
        if self.models is not None:
            self.check_model(request.model)
        if request.priority < self.max_priority:
            most = self.max_priority.name.lower()
            message = f"the key {self.name!r} may ask for {most} at most, not for {request.priority.name.lower()}"
            raise PermissionDeniedError("priority", message)
        if self.tenant is not None and request.tenant not in ("", self.tenant):
            raise PermissionDeniedError("tenant", f"the key {self.name!r} may not send requests of another tenant")
        if self.rates is not None and not self.has_paid:
            self._check_rates(self.rates, now)
        return request if self.tenant is None else replace(request, tenant=self.tenant)

    def took_tokens(self, number: int, now: float) -> None:
        """Charges tokens of a prompt, or of an output that has ended."""
        if self.rates is not None:
            self.rates.take_tokens(number, now)

    def _check_rates(self, rates: Rates, now: float) -> None:
        wait_s, name = rates.wait_s(now)
        if wait_s > 0:
            raise RateLimitError(f"the key {self.name!r} has used up its {name}", wait_s)
        rates.take_request(now)


ANYONE: Final = Caller()
"""Caller where no keys are required."""

TRUSTED: Final = Caller(name=CLUSTER)


class KeySource(Protocol):
    """Source of keys."""

    def ring(self) -> KeyRing:
        """The keys as they are now."""


_caller: ContextVar[Caller | None] = ContextVar("holdfast_caller", default=None)


class Gate:
    """Gate of one router, or of one replica's engine protocol."""

    def __init__(
        self,
        keys: KeySource | None = None,
        cluster_token: str | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Requires no key without `keys`. The `cluster_token` is accepted as well."""
        self._keys = keys
        self.is_locked = keys is not None
        """Whether a key is required."""
        self._clock = clock
        self._own = None if cluster_token is None else _of_cluster(cluster_token)
        self._ring: KeyRing | None = None
        self._with_own = KeyRing()
        self._rates: dict[str, Rates] = {}

    def enter(self, presented: str | None) -> Caller:
        """Authenticates the presented key; the result is the running task's caller from now on. Raises
        `AuthenticationError`: the task then has no caller, whatever the context had that it was started in.
        """
        _caller.set(None)
        caller = self._who(presented or "") if self._keys is not None else ANYONE
        _caller.set(caller)
        return caller

    def enter_trusted(self, tenant: str | None = None, key_name: str = "", *, has_paid: bool = True) -> None:
        """The running task is one of this process's own.

        `tenant`: whom its requests are charged to. `key_name`: the key that was let in with them before, whose rate of
        tokens they are charged to while there is such a key; unless it `has_paid`, its rate of requests as well.
        """
        key = next((one for one in self._known().keys if one.name == key_name), None) if key_name else None
        rates = None if key is None else self._rates_of(key)
        _caller.set(TRUSTED if tenant is None else replace(TRUSTED, tenant=tenant, rates=rates, has_paid=has_paid))

    @property
    def has_entered(self) -> bool:
        """Whether the running task has presented a valid key."""
        return self._keys is not None and _caller.get() is not None

    def caller(self) -> Caller:
        """The caller of the running task. Raises `AuthenticationError` where no API has asked."""
        if self._keys is None:
            return ANYONE
        caller = _caller.get()
        if caller is None:
            raise AuthenticationError(UNKNOWN)
        return caller

    def _who(self, presented: str) -> Caller:
        assert self._keys is not None, "a gate that is not locked asks for no key"
        self._known()
        found = self._with_own.find(presented)
        if found is None:
            raise AuthenticationError(UNKNOWN)
        return TRUSTED if found is self._own else self._caller_of(found)

    def _known(self) -> KeyRing:
        """The keys as they are now, but for the cluster's own."""
        ring = KeyRing() if self._keys is None else self._keys.ring()
        if ring is not self._ring:
            self._ring, self._with_own = ring, KeyRing([*ring.keys, *([] if self._own is None else [self._own])])
            names = {key.name for key in ring.keys}
            self._rates = {name: rates for name, rates in self._rates.items() if name in names}
        return ring

    def _rates_of(self, key: ApiKey) -> Rates:
        limits = key.requests_per_minute, key.tokens_per_minute
        rates = self._rates.get(key.name)
        if rates is None or rates.limits != limits:
            rates = self._rates[key.name] = Rates(*limits)
        return rates

    def _caller_of(self, key: ApiKey) -> Caller:
        return Caller(
            name=key.name,
            tenant=key.charged_tenant,
            models=frozenset(key.models) or None,
            max_priority=key.priority,
            is_operator=key.operator,
            rates=self._rates_of(key),
        )


def _of_cluster(token: str) -> ApiKey:
    return ApiKey(name=CLUSTER, sha256=digest_of(token).hex())


def bearer(authorization: str) -> str:
    """The key in an `authorization` header or metadata; empty if it has another form."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
