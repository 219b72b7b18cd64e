"""Body that is read from JSON text: fields that are not supported, names for errors, objects whose fields are known.

An unknown field of a body is accepted, and logged once. A known field that this server would ignore is refused by name
if it has a non-neutral value, and so is an unknown field of a nested object.
"""

import logging
from collections.abc import Collection, Container, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, PrivateAttr, ValidationError

from holdfast.router.api.http.errors import invalid_body
from holdfast.router.api.intake import loggable
from holdfast.router.request import FieldNames, naming
from holdfast.router.wire.bounds import INLINE_BYTES
from holdfast.router.wire.json_bounds import JsonBounds
from holdfast.worker.process_memory import uncollected
from holdfast.worker.sampling_params import PARAMETERS
from holdfast.worker.value_types import SAMPLING_FIELDS, Neutral, check_names, check_neutral

logger = logging.getLogger(__name__)

_logged: set[str] = set()

T = TypeVar("T")


class _First(FailFast):
    """One of the types of a union."""

    __hash__ = object.__hash__


Listed = Annotated[list[T], _First()]
"""A list whose first invalid element is reported: reporting all takes minutes, and gigabytes."""


class Reads(BaseModel):
    """A body that is read from JSON text; undeclared fields are kept."""

    model_config = ConfigDict(strict=True, extra="allow")

    _origin: "Reads | None" = PrivateAttr(default=None)
    """The body that this one is made of."""

    neutral: ClassVar[Neutral] = {
        **SAMPLING_FIELDS,
        "include_reasoning": (True,),
        "return_prompt_text": (False,),
        "return_token_strs": (False,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "return_token_offsets": (False,),
        "return_weight_versions": (False,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
        "prompt_embeds": ([],),
        "vllm_xargs": ({},),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "multi_modal_data": ({},),
        "multi_modal_uuids": ({},),
        "images": ([],),
        "mm_payload": ("tensors", "none"),
        "return_mm_kwargs": (False, True),  # no prompt here has media, of which these tell
        "moderation": (),
        "stream_options.include_obfuscation": (False,),
    }
    """Fields that are not supported, with their neutral values. None is always neutral, i.e. has no effect. A name with
    a dot is that of a field in an object.
    """

    objects: ClassVar[Mapping[str, Collection[str]]] = {
        "stream_options": ("include_usage", "continuous_usage_stats"),
        "response_format": ("type", "json_schema"),
        "response_format.json_schema": ("name", "description", "strict", "schema"),
        "prompt_cache_options": ("mode", "ttl", "prewarm", "comparison_response_id"),
    }
    """Names of fields in objects, by the object's path: together with the names in `neutral`, all known fields."""

    passed_on: ClassVar[Container[str]] = ()
    """Fields that are not declared, and are read by the body that is made of this one."""

    def given(self, name: str) -> Any:
        """A sampling parameter as the body says it; None where it does not."""
        return (self.model_extra or {}).get(name)

    def shape_field_or(self, named: str) -> str:
        """Field of the output's structure: vLLM's where that is used, else `named`."""
        return "structured_outputs" if self.given("structured_outputs") is not None else named

    renamed: ClassVar[Mapping[str, str]] = {}
    """The request's field by the body's field, where names differ: for reading, and for names in errors."""

    fixed_names: ClassVar[Mapping[str, str]] = {}
    """Names in errors by fields of the request, where they do not depend on the body."""

    def given_renamed(self) -> dict[str, Any]:
        """Values of renamed fields, by the request's name; without those of dotted names."""
        given = ((other, getattr(self, own, None)) for own, other in self.renamed.items() if "." not in own + other)
        return {other: value for other, value in given if value is not None}

    def names(self) -> FieldNames:
        """The body's names for the fields of the request made from it."""
        said = {other: own for own, other in self.renamed.items() if self._says(own)}
        return FieldNames({**self.fixed_names, **said})

    def _says(self, own: str) -> bool:
        value = getattr(self, own.partition(".")[0], None)
        return value is not None

    lists_of_ids: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)
    """Fields that may be long lists of token ids, which are read apart: pydantic takes ten times as long."""

    lists_of_objects: ClassVar[tuple[str, ...]] = ()
    """Fields that may be long lists of objects, which are read apart: a parser holds Python's lock to its end."""

    @classmethod
    def read(cls, content: bytes, bounds: JsonBounds | None = None) -> Self:
        """The body that JSON text says, within bounds. Raises `InvalidRequestError`, naming the field."""
        apart = dict[str, list[Any]]()
        if bounds is not None:
            content, apart = bounds.take_apart(content, cls.lists_of_ids, cls.lists_of_objects)
        try:
            with uncollected() if len(content) > INLINE_BYTES else nullcontext():
                body = cls.model_validate_json(content)
        except ValidationError as error:
            raise invalid_body(error) from None
        for name, elements in apart.items():
            setattr(body, name, elements)
        body._check_extra()
        body._check_together()
        return body

    @classmethod
    def made(cls, fields: Mapping[str, Any]) -> Self:
        """The body of fields that another body says. Raises `InvalidRequestError`, naming the field."""
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise invalid_body(error) from None
        body._check_extra()
        body._check_together()
        return body

    @classmethod
    def made_of(cls, origin: "Reads", fields: Mapping[str, Any]) -> Self:
        """Like `made`, for a body that reports errors by its own field names."""
        with naming(origin.names):
            body = cls.made(fields)
        body._origin = origin
        return body

    def _check_together(self) -> None:
        """Raises `InvalidRequestError` for a field that means nothing beside the others."""

    def _check_extra(self) -> None:
        for own in self.model_fields_set:
            if own in self.objects:
                self._check_inside(own)
        for name, value in (self.model_extra or {}).items():
            if name in self.neutral:
                if value is not None:
                    check_neutral(name, value, self.neutral[name])
            elif not self.knows(name) and name not in _logged and len(_logged) < 1000:
                _logged.add(name)
                logger.warning("a request has a field that is not known here, %r: it is ignored", loggable(name))

    def _check_inside(self, own: str) -> None:
        """Raises `InvalidRequestError` for an unknown field of an object, or one with an unsupported value."""
        for path, known in self.objects.items():
            if path == own or path.startswith(f"{own}."):
                fields, wishes = self._object(path), self._wishes(path)
                for name in wishes.keys() & fields.keys():
                    if fields[name] is not None:
                        check_neutral(f"{path}.{name}", fields[name], wishes[name])
                check_names(fields, known, path, wishes)

    @classmethod
    @cache
    def _wishes(cls, path: str) -> Neutral:
        """The part of `neutral` that is of an object's fields, by their names in it."""
        places = ((name.rpartition("."), values) for name, values in cls.neutral.items())
        return {name: values for (own, _, name), values in places if own == path}

    def _object(self, path: str) -> Mapping[str, Any]:
        """The fields of an object; none where there is none. Fields that a model declares are known."""
        own, _, inner = path.partition(".")
        value = getattr(self, own)
        if inner:
            value = getattr(value, inner) if isinstance(value, BaseModel) else (value or {}).get(inner)
        elif isinstance(value, BaseModel):
            value = value.model_extra
        return value if isinstance(value, Mapping) else {}

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether a field is read, or refused unless its value is neutral."""
        declared = name in cls.model_fields or name in cls.neutral or name in PARAMETERS
        return declared or name in cls.passed_on
