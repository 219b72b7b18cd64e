"""Flag table, `flags.json`: names, types, defaults and help texts of settings and sampling parameters, for help,
parsing and completion.

The declarations take pydantic and a quarter of a second; the table of them takes a millisecond.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PATH: Final = Path(__file__).with_name("flags.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingFlag:
    """A setting that may be said as a flag. Secrets may not: others can see the arguments of a process."""

    path: str
    """Dotted, as in `parallel.tensor_parallel_size`."""
    help: str
    is_switch: bool

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """The last name, which is unique in the tree."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlag:
    """A sampling parameter that may be said as a flag."""

    name: str
    kind: str
    """`number`, `whole`, `switch`, `texts`, `token_ids` or `biases`."""
    is_optional: bool
    default: Any
    topic: str
    help: str
    short: str
    negative: str
    """Turns it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagTable:
    sections: tuple[str, ...]
    settings: tuple[SettingFlag, ...]
    sampling: tuple[SamplingFlag, ...]


@functools.cache
def flag_table() -> FlagTable:
    """The table of flags stored for this version of the package."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    return FlagTable(
        sections=tuple(content["sections"]),
        settings=tuple(SettingFlag(**row) for row in content["settings"]),
        sampling=tuple(SamplingFlag(**row) for row in content["sampling"]),
    )
