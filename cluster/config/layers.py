"""Layer of settings: values by dotted path, each with the source that it came from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from, as a user knows it (`--tp`, `serve.yaml`, a variable)."""

    value: object
    source: str


Layer = dict[str, Setting]
