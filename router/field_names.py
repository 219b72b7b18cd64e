"""Field names: what a client calls the fields of its request, so that a refusal names what the client wrote.

Each door makes them of the same table by which it reads its messages. What may not live here: any door's own fields.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import FIELD


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Client's names by fields of a request. A name ends with `.` where it is a prefix; else it is a field with all
    that is in it. The longest that fits counts.
    """

    names: Mapping[str, str]
    then: "FieldNames | None" = None
    """What these names stand for in turn, where one message is read as another one."""

    def of(self, field: str) -> str:
        """The client's name of a field, or of a part of it, such as `stop[2]`."""
        for name in sorted(self.names, key=len, reverse=True):
            rest = field.removeprefix(name)
            if field.startswith(name) and (name.endswith(".") or rest[:1] in ("", ".", "[")):
                field = self.names[name] + rest
                break
        return field if self.then is None else self.then.of(field)

    def error(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same refusal in the client's words."""
        field, limit = self.of(error.field), error.limit
        if error.field.startswith(f"{FIELD}."):
            limit = _PARAMETER.sub(lambda found: self._other(found[0]), limit)
        if (field, limit) == (error.field, error.limit):
            return error
        return InvalidRequestError(field, error.value, limit)

    def _other(self, parameter: str) -> str:
        """Of a parameter that the limit of another one names."""
        is_renamed = f"{FIELD}.{parameter}" in self.names or (self.then is not None and parameter in self.then.names)
        return self.of(f"{FIELD}.{parameter}") if is_renamed else parameter


_PARAMETER: Final = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
"""What may be a parameter's name in a sentence."""

Namer: TypeAlias = Callable[[], FieldNames]

OWN_NAMES: Final = FieldNames({})
"""Those of the public proto."""


def own_names() -> FieldNames:
    return OWN_NAMES


@contextmanager
def naming(namer: Namer) -> Iterator[None]:
    """What refuses a request in here does so in its client's words."""
    try:
        yield
    except InvalidRequestError as error:
        named = namer().error(error)
        if named is error:
            raise
        raise named from None
