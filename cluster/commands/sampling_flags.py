"""Command-line flags of the sampling parameters, made from the table of their declarations (`flags.py`).
`SamplingParams` checks the values, as for any caller.
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter as Option

from holdfast.cluster.config.flags import ENDING, REPORT, SAMPLING, STRUCTURE, SamplingFlag, flag_table
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.worker.sampling_params import SamplingParams
    from holdfast.worker.structured_outputs import StructuredOutputs

_GROUPS: Final = {group.name: group for group in (SAMPLING, STRUCTURE, ENDING, REPORT)}
_TYPES: Final[dict[str, Any]] = {
    "number": float,
    "whole": int,
    "switch": bool,
    "texts": list[str] | None,
    "token_ids": list[int] | None,
    "biases": list[str] | None,
}
_NOTES: Final = {
    "texts": "; may be repeated",
    "token_ids": "; a token id, may be repeated",
    "biases": "; TOKEN_ID=BIAS, may be repeated",
}


def flags_of(declared: Iterable[SamplingFlag]) -> type:
    """A dataclass with one flag for each parameter of the table."""
    fields = [(item.name, _annotation(item), item.default) for item in declared]
    own = {"__module__": __name__}  # else cyclopts takes it for a built-in type
    return make_dataclass("ParameterFlags", fields, namespace=own, frozen=True, kw_only=True)


def _annotation(item: SamplingFlag) -> Any:
    long_flag = f"--{item.name.replace('_', '-')}"
    option = Option(
        name=[long_flag, item.short] if item.short else None,
        group=_GROUPS[item.topic.capitalize()],
        help=item.help + _NOTES.get(item.kind, ""),
        negative=item.negative or (),
    )
    kind = _TYPES[item.kind]
    return Annotated[kind | None if item.is_optional else kind, option]


_ParameterFlags: Any = flags_of(flag_table().sampling)


def _shape(help: str) -> Option:
    return Option(group=STRUCTURE, help=help, negative=())


@dataclass(frozen=True, kw_only=True)
class SamplingFlags(_ParameterFlags):  # type: ignore[misc]  # a class made from the declarations
    """Fields are named as in `SamplingParams`; each kind of structured output has a separate flag."""

    json_schema: Annotated[str | None, _shape("a JSON schema that the output follows, or a file that holds one")] = None
    json_object: Annotated[bool, _shape("the output is a JSON object")] = False
    regex: Annotated[str | None, _shape("regular expression that the whole output matches")] = None
    choice: Annotated[list[str] | None, _shape("one of the texts that the output can be; may be repeated")] = None
    grammar: Annotated[str | None, _shape("a Lark grammar that the output follows, or a file that holds one")] = None

    def params(self) -> "SamplingParams":
        """Raises `InvalidRequestError`, and `ConfigurationError` for a value of the wrong form."""
        from holdfast.worker.sampling_params import SamplingParams

        declared = flag_table().sampling
        values = {item.name: getattr(self, item.name) for item in declared}
        for item in declared:
            if item.kind == "biases":
                values[item.name] = dict(
                    _bias(f"--{item.name.replace('_', '-')}", text) for text in values[item.name] or ()
                )
        return SamplingParams(**values, structured_outputs=self._structured_outputs())

    def _structured_outputs(self) -> "StructuredOutputs | None":
        from holdfast.worker.structured_outputs import StructuredOutputs

        kinds = (self.json_schema, self.json_object, self.regex, self.choice, self.grammar)
        if not any(kind not in (None, False) for kind in kinds):
            return None
        schema_is_text = self.json_schema is None or self.json_schema.lstrip().startswith("{")
        grammar_is_text = self.grammar is None or ":" in self.grammar
        return StructuredOutputs(
            json=self.json_schema if schema_is_text else _read("--json-schema", self.json_schema),
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar if grammar_is_text else _read("--grammar", self.grammar),
        )


def _read(flag: str, path: str | None) -> str:
    try:
        return Path(path or "").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag}: neither the text itself nor a file to be read: {error}") from None


def _bias(flag: str, text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ConfigurationError(f"{flag} {text!r}: must be TOKEN_ID=BIAS, such as 42=-5") from None
