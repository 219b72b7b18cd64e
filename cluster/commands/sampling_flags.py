"""Command-line flags of the sampling parameters, made from their declarations (`worker/sampling_params.py`).

What may not live here: commands, and what the parameters mean. `SamplingParams` checks the values, as for any caller.
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter as Option

from holdfast.cluster.config.flags import ENDING, REPORT, SAMPLING, STRUCTURE
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.parameters import BIASES, NUMBER, SWITCH, TEXTS, TOKEN_IDS, WHOLE, Kind, Parameter, Topic
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

_GROUPS: Final = {
    Topic.SAMPLING: SAMPLING,
    Topic.STRUCTURE: STRUCTURE,
    Topic.ENDING: ENDING,
    Topic.REPORT: REPORT,
}
_TYPES: Final[dict[Kind, Any]] = {
    NUMBER: float,
    WHOLE: int,
    SWITCH: bool,
    TEXTS: list[str] | None,
    TOKEN_IDS: list[int] | None,
    BIASES: list[str] | None,
}
_NOTES: Final = {
    TEXTS: "; may be repeated",
    TOKEN_IDS: "; a token id, may be repeated",
    BIASES: "; TOKEN_ID=BIAS, may be repeated",
}


def flags_of(parameters: Iterable[Parameter]) -> type:
    """A dataclass with one flag for each parameter, but for those that have several, such as structured outputs."""
    fields = [(item.name, _annotation(item), _default(item)) for item in parameters if item.kind in _TYPES]
    own = {"__module__": __name__}  # else cyclopts takes it for a built-in type
    return make_dataclass("ParameterFlags", fields, namespace=own, frozen=True, kw_only=True)


def _annotation(item: Parameter) -> Any:
    about, long_flag = item.about, f"--{item.name.replace('_', '-')}"
    option = Option(
        name=[long_flag, about.short_flag] if about.short_flag else None,
        group=_GROUPS[about.topic],
        help=item.help + _NOTES.get(item.kind, ""),
        negative=about.negative_flag or (),
    )
    kind = _TYPES[item.kind]
    return Annotated[kind | None if item.is_optional else kind, option]


def _default(item: Parameter) -> Any:
    if item.about.flag_default is not ...:
        return item.about.flag_default
    return None if item.kind in _NOTES else item.default


_ParameterFlags: Any = flags_of(PARAMETERS.values())


def _shape(help: str) -> Option:
    return Option(group=STRUCTURE, help=help, negative=())


@dataclass(frozen=True, kw_only=True)
class SamplingFlags(_ParameterFlags):  # type: ignore[misc]  # a class made from the declarations
    """Fields are named as in `SamplingParams`; the kinds of structured output are flags of their own."""

    json_schema: Annotated[str | None, _shape("a JSON schema that the output follows, or a file that holds one")] = None
    json_object: Annotated[bool, _shape("the output is a JSON object")] = False
    regex: Annotated[str | None, _shape("what the whole output matches")] = None
    choice: Annotated[list[str] | None, _shape("one of the texts that the output can be; may be repeated")] = None
    grammar: Annotated[str | None, _shape("a Lark grammar that the output follows, or a file that holds one")] = None

    def params(self) -> SamplingParams:
        """Raises `InvalidRequestError`, and `ConfigurationError` for what is not even of the right form."""
        values = {item.name: getattr(self, item.name) for item in PARAMETERS.values() if item.kind in _TYPES}
        for item in PARAMETERS.values():
            if item.kind is BIASES:
                values[item.name] = dict(
                    _bias(f"--{item.name.replace('_', '-')}", text) for text in values[item.name] or ()
                )
        return SamplingParams(**values, structured_outputs=self._structured_outputs())

    def _structured_outputs(self) -> StructuredOutputs | None:
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
