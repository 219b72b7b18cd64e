"""Command-line flags of the settings: one per setting, named and described by the configuration tree itself.

What may not live here: commands, and what the settings mean (`config.py`).
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from cyclopts import Group, Parameter
from pydantic.fields import FieldInfo

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.sources import Setting, is_secret, leaves, value_of_text

ESSENTIALS: Final = Group.create_ordered("Essentials")
SAMPLING: Final = Group.create_ordered("Sampling")
STRUCTURE: Final = Group.create_ordered("Structured output")
ENDING: Final = Group.create_ordered("End of the output")
REPORT: Final = Group.create_ordered("Several completions, and what is reported")

_ESSENTIAL: Final = ("model.model", "parallel.tensor_parallel_size", "model.dtype", "cluster.replicas", "cluster.port")
_SHORT: Final = {"parallel.tensor_parallel_size": "--tp"}
_GROUPS: Final = {name: Group.create_ordered(name.capitalize()) for name in HoldfastConfig.model_fields}


def takes_settings(*sections: str, without: tuple[str, ...] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command a flag for every setting of `sections`, but for the paths in `without`.

    A flag has the setting's last name, which is unique in the tree. The command gets those that were set as its
    keyword argument `settings`, a layer for `load_config`.
    """
    chosen = [(path, field) for path, field in leaves(HoldfastConfig) if path.partition(".")[0] in sections]
    flags = {
        path.rpartition(".")[2]: (path, field)
        for path, field in chosen
        if path not in without and not is_secret(field)  # others can see the arguments of a process
    }

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def run(*arguments: object, **options: Any) -> int:
            settings = dict(_settings_of(flags, options))
            rest = {name: value for name, value in options.items() if name not in flags}
            return command(*arguments, settings=settings, **rest)

        own = [item for item in inspect.signature(command).parameters.values() if item.name != "settings"]
        added = [_parameter(argument, path, field) for argument, (path, field) in flags.items()]
        parameters = [*own, *sorted(added, key=lambda item: item.annotation.__metadata__[0].group[0].sort_key)]
        run.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        return run

    return decorate


def _settings_of(flags: dict[str, tuple[str, FieldInfo]], options: dict[str, Any]) -> Iterator[tuple[str, Setting]]:
    for argument, (path, field) in flags.items():
        value = options.get(argument)
        if value is not None:
            chosen = value_of_text(value, field) if isinstance(value, str) else value
            yield path, Setting(chosen, f"--{argument.replace('_', '-')}")


def _parameter(argument: str, path: str, field: FieldInfo) -> inspect.Parameter:
    """An option that keeps its text, so that every value is checked in one place, whichever source it came from."""
    names = [f"--{argument.replace('_', '-')}"] + ([_SHORT[path]] if path in _SHORT else [])
    group = ESSENTIALS if path in _ESSENTIAL else _GROUPS[path.partition(".")[0]]
    kind = bool if field.annotation is bool else str
    option = Parameter(name=names, group=group, help=_help(field), show_default=False, metavar="VALUE")
    return inspect.Parameter(
        argument, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(field: FieldInfo) -> str:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    notes = [f"choices: {', '.join(map(str, choices))}"] if choices else []
    notes += [] if field.default is None else [f"default: {field.default}"]
    return f"{field.description or ''} [{'; '.join(notes)}]" if notes else field.description or ""
