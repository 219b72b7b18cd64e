"""Layer of settings: values by dotted path, each with the source that it came from.

What may not live here: reading sources and merging layers (`sources.py`), and any heavy import: commands are described
in these words before a setting is declared.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from, as a user knows it (`--tp`, `serve.yaml`, a variable)."""

    value: object
    source: str


Layer = dict[str, Setting]
