"""Commands `holdfast keys add`, `list` and `revoke`: the file of API keys, which routers read again when it changes."""

import secrets
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from holdfast.worker.errors import ConfigurationError

_File = Annotated[Path, Parameter(help="file of API keys; routers read the file named by --api-keys")]
_DEFAULT: Final = Path("keys.json")


def add(
    name: Annotated[str, Parameter(help="name of the key, in lists and errors")],
    *,
    file: _File = _DEFAULT,
    tenant: Annotated[str, Parameter(help="tenant that requests are charged to [default: the key's name]")] = "",
    models: Annotated[
        list[str] | None, Parameter(help="a model that the key may use; repeat the flag for several [default: all]")
    ] = None,
    requests_per_minute: Annotated[
        float | None, Parameter(help="maximum requests per minute and router [default: unlimited]")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, Parameter(help="maximum prompt and output tokens per minute and router [default: unlimited]")
    ] = None,
    max_priority: Annotated[
        Literal["critical", "high", "normal", "low"], Parameter(help="best class of service that the key may request")
    ] = "normal",
    operator: Annotated[
        bool, Parameter(negative=(), help="operator key: may read load, metrics and logs, and change the cluster")
    ] = False,
) -> int:
    """Make a key, and print it: this once, since the file has only its hash."""
    from holdfast.router.security.api_keys import KEY_PREFIX, ApiKey, KeyRing, digest_of, read_keys, write_keys

    ring = read_keys(file) if file.exists() else KeyRing()
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    try:
        entry = ApiKey(
            name=name,
            sha256=digest_of(key).hex(),
            tenant=tenant,
            models=tuple(models or ()),
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            max_priority=max_priority,
            operator=operator,
        )
    except ValueError as error:
        raise ConfigurationError(f"keys add: {' '.join(str(error).split())}") from None
    write_keys(file, ring.with_key(entry))
    print(key)
    return 0


def show(*, file: _File = _DEFAULT) -> int:
    """List the keys, and what each may do."""
    from holdfast.router.security.api_keys import read_keys

    for key in read_keys(file).keys:
        rates = [
            f"{number:g} {unit} a minute"
            for number, unit in ((key.requests_per_minute, "requests"), (key.tokens_per_minute, "tokens"))
            if number is not None
        ]
        models = f"models {', '.join(key.models)}" if key.models else "all models"
        rights = [f"tenant {key.charged_tenant}", models, *rates, f"up to {key.max_priority}"]
        print(f"{key.name}: {', '.join(rights + (['operator'] if key.operator else []))}")
    return 0


def revoke(name: Annotated[str, Parameter(help="the key's name")], *, file: _File = _DEFAULT) -> int:
    """Take a key away. Routers refuse it within a second or two; what runs may finish."""
    from holdfast.router.security.api_keys import read_keys, write_keys

    write_keys(file, read_keys(file).without(name))
    return 0
