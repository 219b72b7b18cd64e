"""Generator of the command line's flag table, `cluster/config/flags.json`. `--check` only tells whether it is current.

python -m scripts.flag_table [--check]
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.flags import PATH, SamplingFlag, SettingFlag
from holdfast.cluster.config.sources import is_secret, leaves
from holdfast.worker.parameters import BIASES, NUMBER, SWITCH, TEXTS, TOKEN_IDS, WHOLE, Kind, Parameter
from holdfast.worker.sampling_params import PARAMETERS
from scripts.generated_file import keep

KINDS: Final[dict[Kind, str]] = {
    NUMBER: "number",
    WHOLE: "whole",
    SWITCH: "switch",
    TEXTS: "texts",
    TOKEN_IDS: "token_ids",
    BIASES: "biases",
}
"""Kinds of parameters with one flag. The flags of structured outputs are declared separately."""

_LISTS: Final = (TEXTS, TOKEN_IDS, BIASES)


def setting_flags() -> list[SettingFlag]:
    return [
        SettingFlag(path=path, help=_help(field), is_switch=field.annotation is bool)
        for path, field in leaves(HoldfastConfig)
        if not is_secret(field)
    ]


def sampling_flags(parameters: Iterable[Parameter]) -> list[SamplingFlag]:
    return [
        SamplingFlag(
            name=item.name,
            kind=KINDS[item.kind],
            is_optional=item.is_optional,
            default=_default(item),
            topic=item.metadata.group.value,
            help=item.help,
            short=item.metadata.short_flag,
            negative=item.metadata.negative_flag,
        )
        for item in parameters
        if item.kind in KINDS
    ]


def table() -> str:
    """The whole file: one row a line, so that a change of a setting is a change of a line."""
    parts: dict[str, list[object]] = {
        "sections": list(HoldfastConfig.model_fields),
        "settings": [asdict(row) for row in setting_flags()],
        "sampling": [asdict(row) for row in sampling_flags(PARAMETERS.values())],
    }
    shown = [
        f'"{name}": [\n' + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"
        for name, rows in parts.items()
    ]
    return "{\n" + ",\n".join(shown) + "\n}\n"


def _help(field: FieldInfo) -> str:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    notes = [f"choices: {', '.join(map(str, choices))}"] if choices else []
    default = field.get_default(call_default_factory=True)
    notes += [] if default is None else [f"default: {default}"]
    return f"{field.description or ''} [{'; '.join(notes)}]" if notes else field.description or ""


def _default(item: Parameter) -> object:
    if item.metadata.flag_default is not ...:
        return item.metadata.flag_default
    return None if item.kind in _LISTS else item.default


def main() -> None:
    keep(PATH, table(), "declarations", "scripts.flag_table")


if __name__ == "__main__":
    main()
