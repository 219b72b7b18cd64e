"""Prompts of two texts, as a model's tokenizer joins them: `[CLS] a [SEP] b [SEP]`, `<s> a </s></s> b </s>`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.worker.special_tokens import read_json


class PairForm(NamedTuple):
    """Tokens between two texts."""

    between: str
    """Special tokens, as they are written."""
    separator: int | None
    """The first of them, where the tokens behind it are counted to the second text (token type 1)."""


def pair_form(folder: Path) -> PairForm | None:
    """The form in which tokenizer.json joins two texts; None: it does not say, or does not join them."""
    for processor in _processors(read_json(folder / "tokenizer.json").get("post_processor")):
        kind = processor.get("type")
        if kind == "TemplateProcessing":
            return _of_template(processor)
        if kind in ("BertProcessing", "RobertaProcessing"):
            token, number = processor["sep"]
            is_bert = kind == "BertProcessing"
            return PairForm(token if is_bert else token * 2, number if is_bert else None)
    return None


def _processors(found: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(found, Mapping):
        yield found
        for inner in found.get("processors") or ():
            yield from _processors(inner)


def _of_template(processor: Mapping[str, Any]) -> PairForm | None:
    between: list[str] = []
    is_between = False
    for piece in processor.get("pair") or ():
        text = piece.get("Sequence")
        if text is None and is_between:
            between.append(piece["SpecialToken"]["id"])
        elif text is not None and text["id"] == "B":
            tokens = [processor["special_tokens"][name] for name in between]
            if not tokens:
                return None
            is_second = text.get("type_id") == 1
            return PairForm(
                "".join("".join(one["tokens"]) for one in tokens), tokens[0]["ids"][0] if is_second else None
            )
        is_between = is_between or text is not None
    return None
