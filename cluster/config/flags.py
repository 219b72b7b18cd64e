"""Command-line flags of the settings: one per setting, named and described as the configuration tree has it.

Help, parsing and completion read names, types, defaults and help texts from a table of them (`flags.json`): the tree
itself takes pydantic and a quarter of a second, the table a millisecond.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter

from holdfast.cluster.config.layers import Setting

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


ESSENTIALS: Final = Group.create_ordered("Essentials")
SAMPLING: Final = Group.create_ordered("Sampling")
STRUCTURE: Final = Group.create_ordered("Structured output")
ENDING: Final = Group.create_ordered("End of the output")
REPORT: Final = Group.create_ordered("Several completions, and reported data")

SECTIONS: Final = flag_table().sections
"""The names of all sections of settings."""

_ESSENTIAL: Final = ("model.model", "parallel.tensor_parallel_size", "model.dtype", "cluster.replicas", "cluster.port")
_SHORT: Final = {"parallel.tensor_parallel_size": "--tp"}
_GROUPS: Final = {name: Group.create_ordered(name.capitalize()) for name in SECTIONS}


def takes_settings(*sections: str, without: tuple[str, ...] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command a flag for every setting of `sections`, but for the paths in `without`.

    A flag has the setting's last name, which is unique in the tree. The command gets the flags that were set as its
    keyword argument `settings`, a layer for `load_config`.
    """
    flags = {flag.name: flag for flag in flag_table().settings if flag.section in sections and flag.path not in without}

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def run(*arguments: object, **options: Any) -> int:
            settings = dict(_settings_of(flags, options))
            rest = {name: value for name, value in options.items() if name not in flags}
            return command(*arguments, settings=settings, **rest)

        own = [item for item in inspect.signature(command).parameters.values() if item.name != "settings"]
        added = [_parameter(flag) for flag in flags.values()]
        parameters = [*own, *sorted(added, key=lambda item: item.annotation.__metadata__[0].group[0].sort_key)]
        run.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        return run

    return decorate


def _settings_of(flags: dict[str, SettingFlag], options: dict[str, Any]) -> Iterator[tuple[str, Setting]]:
    given = {name: options[name] for name in flags if options.get(name) is not None}
    if not given:
        return
    from holdfast.cluster.config.config import HoldfastConfig
    from holdfast.cluster.config.sources import leaves, value_of_text

    fields = dict(leaves(HoldfastConfig))
    for name, value in given.items():
        path = flags[name].path
        chosen = value_of_text(value, fields[path]) if isinstance(value, str) else value
        yield path, Setting(chosen, f"--{name.replace('_', '-')}")


def _parameter(flag: SettingFlag) -> inspect.Parameter:
    """An option that keeps its text, so that every value is checked in one place, whichever source it came from."""
    names = [f"--{flag.name.replace('_', '-')}"] + ([_SHORT[flag.path]] if flag.path in _SHORT else [])
    group = ESSENTIALS if flag.path in _ESSENTIAL else _GROUPS[flag.section]
    kind = bool if flag.is_switch else str
    option = Parameter(name=names, group=group, help=flag.help, show_default=False, metavar="VALUE")
    return inspect.Parameter(
        flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
