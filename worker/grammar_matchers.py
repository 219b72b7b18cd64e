"""Grammar matchers: they follow each output through its grammar and mask the tokens that may not come next. A mask is a
function of the grammar and the output so far; a matcher kept from step to step only saves consuming the output again.
"""

import json
import logging
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.worker.draws import DrawParams
from holdfast.worker.special_tokens import configured_special, generation_ends, named_tokens
from holdfast.worker.step_plan import ScheduledSequence, StepPlan

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

_KEPT_STEPS: Final = 32
"""Steps without a draw after which a sequence's matcher is dropped; later it is built again from the output."""


_MARK: Final = "\x02"
"""A character that never continues a word: text after it is encoded as in the middle of a text."""

_SPECIAL_NAME: Final = re.compile(r"<\|.*\|>", re.DOTALL)
"""Tokens that llguidance takes for special by their names."""

_UNMARKED: Final = re.compile(r'"special"\s*:\s*false')
"""A token that a tokenizer.json adds and does not call special."""

NONE_FITS: Final = b""
"""Value in place of a mask: no token may come next."""


class Matcher(Protocol):
    """A grammar, and where in it an output is. The names are llguidance's."""

    def compute_bitmask(self) -> bytes:
        """A bit for each token, the lowest first: it may come next."""
        ...

    def validate_tokens(self, tokens: list[int], /) -> int:
        """Number of tokens, from the first on, that may come next."""
        ...

    def consume_token(self, token: int, /) -> bool:
        """Reads a token that may come next."""
        ...

    def consume_tokens(self, tokens: list[int], /) -> bool: ...

    def rollback(self, num_tokens: int, /) -> bool:
        """Takes the last tokens back."""
        ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


@dataclass(slots=True)
class _MatchedOutput:
    """A grammar and how much of an output it has read."""

    matcher: Matcher
    token_ids: "tuple[int, ...] | array[int]"
    last_step_id: int


class GrammarMatchers:
    """The matchers of one replica, by sequence."""

    def __init__(self, make_matcher: Callable[[str], Matcher], eos_token_ids: frozenset[int]) -> None:
        """`make_matcher` makes of a grammar a matcher that has read nothing yet."""
        self._make_matcher = make_matcher
        self._eos_token_ids = eos_token_ids
        self._matched: dict[int, _MatchedOutput] = {}  # by sequence id

    def __len__(self) -> int:
        return len(self._matched)

    def masks(self, plan: StepPlan) -> dict[int, bytes]:
        """Masks by number of a plan's logits row: a bit for each token of the tokenizer, the lowest first, set if it
        may come next.

        An end of sequence may come where the grammar is fulfilled; once it is and nothing can follow, only that may.
        `NONE_FITS` stands for a dead end: nothing may come next, or what may cannot be found out.
        Rows without a grammar have no mask, nor those after a draft that breaks it, since their draws do not count.
        """
        masks: dict[int, bytes] = {}
        for of_sequence in self.each(plan):
            masks |= of_sequence
        return masks

    def each(self, plan: StepPlan) -> Iterator[dict[int, bytes]]:
        """`masks`, sequence by sequence in the order of `rows_with_grammars`, each worked out when it is asked for."""
        for row, sequence, draw in _with_grammars(plan):
            yield dict(enumerate(self._sequence_masks(sequence, draw, plan.step_id), row))
        for sequence_id, matched in list(self._matched.items()):
            if matched.last_step_id < plan.step_id - _KEPT_STEPS:
                del self._matched[sequence_id]

    def _sequence_masks(self, sequence: ScheduledSequence, draw: DrawParams, step_id: int) -> list[bytes]:
        """The mask of each draw; draw i comes after i drafts, which the matcher takes back afterwards."""
        matcher = self._matcher_after(sequence.sequence_id, draw, step_id)
        masks = [_mask(matcher)]
        num_read = 0
        for draft in sequence.token_ids[len(sequence.token_ids) - sequence.num_draws + 1 :]:
            if not masks[-1] or draft in self._eos_token_ids or matcher.validate_tokens([draft]) == 0:
                break
            matcher.consume_token(draft)
            num_read += 1
            masks.append(_mask(matcher))
        if num_read:
            matcher.rollback(num_read)
        if not masks[-1] or matcher.is_error():  # it stays in the error, also where the draft before it was wrong
            del self._matched[sequence.sequence_id]
            reason = matcher.get_error().partition("\n")[0]  # the rest quotes the grammar, which is the caller's
            logger.warning("the output of sequence %d is at a dead end: %s", sequence.sequence_id, reason)
        return masks

    def _matcher_after(self, sequence_id: int, draw: DrawParams, step_id: int) -> Matcher:
        """The matcher that has read the output before `draw`."""
        token_ids = draw.output_token_ids
        matched = self._matched.get(sequence_id)
        if matched is None or token_ids[: len(matched.token_ids)] != matched.token_ids:
            matched = self._matched[sequence_id] = _MatchedOutput(self._make_matcher(_grammar(draw)), (), step_id)
        matched.matcher.consume_tokens(list(token_ids[len(matched.token_ids) :]))
        matched.token_ids, matched.last_step_id = token_ids, step_id
        return matched.matcher


def _mask(matcher: Matcher) -> bytes:
    """A matcher that is in an error allows an end of sequence, as if the output were complete."""
    mask = matcher.compute_bitmask()
    return NONE_FITS if matcher.is_error() or not any(mask) else mask


def rows_with_grammars(plan: StepPlan) -> list[range]:
    """The logits rows of each sequence of a plan that has a grammar."""
    return [range(row, row + sequence.num_draws) for row, sequence, _ in _with_grammars(plan)]


def _with_grammars(plan: StepPlan) -> Iterator[tuple[int, ScheduledSequence, DrawParams]]:
    """Sequences with a grammar, each with its first logits row and its draw."""
    row = len(plan.decodes.token_ids)  # sequences without a grammar
    for sequence in plan.others:
        if sequence.draw is not None:
            if _grammar(sequence.draw):
                yield row, sequence, sequence.draw
            row += sequence.num_draws


def _grammar(draw: DrawParams) -> str:
    """The grammar of a draw; empty for none."""
    return draw.logits_settings.grammar if draw.logits_settings is not None else ""


def grammar_tokenizer(path: Path, eos_token_ids: Collection[int] | None = None) -> "LLTokenizer":
    """Tokenizer of a tokenizer.json. Takes a second where it is large. `eos_token_ids` of None: none need to be right,
    as where a grammar is only checked. Raises ValueError if llguidance does not support the tokenizer.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = None if eos_token_ids is None else sorted(eos_token_ids)
    encoder = _PlainEncoder(_with_all_special(path, ends or ()), ends)
    return LLTokenizer(TokenizerWrapper(encoder), eos_token=ends or [encoder.eos_token_id])


def _with_all_special(path: Path, eos_token_ids: Collection[int]) -> str:
    """A tokenizer.json in which each token is marked as special that the settings beside it call so, that ends an
    output, or that llguidance takes for special because of its name: forced text is never written with them.
    """
    text = path.read_text(encoding="utf-8")
    if not _UNMARKED.search(text):
        return text
    named = {*named_tokens(path.parent).values(), *configured_special(path.parent)}
    ends = {*eos_token_ids, *generation_ends(path.parent)}
    try:
        described = json.loads(text)
        unmarked = [token for token in described.get("added_tokens") or () if not token["special"]]
        found = [
            t for t in unmarked if t["id"] in ends or t["content"] in named or _SPECIAL_NAME.fullmatch(t["content"])
        ]
    except (ValueError, TypeError, LookupError, AttributeError):
        return text  # which the library refuses by its own words
    for token in found:
        token["special"] = True
    return json.dumps(described) if found else text


class _PlainEncoder:
    """Tokenizer interface of llguidance for tokenizers that it does not read by itself."""

    bos_token_id = None

    def __init__(self, text: str, eos_token_ids: Sequence[int] | None) -> None:
        """`text` is that of a tokenizer.json."""
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizers cannot read the tokenizer.json: {error}") from error
        num_ids = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        names = [self._tokenizer.id_to_token(token_id) for token_id in range(num_ids)]
        dense = _without_holes(text) if None in names else text
        place_of = Tokenizer.from_str(dense).get_vocab() if None in names else {}
        places = {index: place_of.get(name, index) for index, name in enumerate(names) if name is not None}
        ends = [places[token_id] for token_id in eos_token_ids or () if token_id in places]
        known = LLTokenizer(dense, eos_token=ends or None, slices=[])
        self.eos_token_id = next((index for index, place in places.items() if place == known.eos_token), 0)
        self.tokens = [known.decode_bytes([places[index]]) if index in places else b"" for index in range(num_ids)]
        self.special_token_ids = [index for index, place in places.items() if known.is_special_token(place)]
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text, which name no special token. It continues an output: the space that SentencePiece puts
        before the first word of a text is left out.
        """
        if not isinstance(text, str):
            raise TypeError("texts only")
        token_ids = self._encoded(text)
        if self._bytes_of(token_ids) == text.encode():
            return token_ids
        mark = self._encoded(_MARK)
        marked = self._encoded(_MARK + text)
        return marked[len(mark) :] if marked[: len(mark)] == mark else token_ids

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """Bytes of ids that the vocabulary knows: a token that a model has added lies beyond it."""
        return b"".join(self.tokens[token_id] for token_id in token_ids if token_id < len(self.tokens))


def _without_holes(text: str) -> str:
    """A tokenizer.json whose vocabulary has the smallest possible ids: llguidance reads ids from 0 to the number of
    tokens.
    """
    described = json.loads(text)
    ids = described["model"]["vocab"]
    described["model"]["vocab"] = {name: place for place, name in enumerate(sorted(ids, key=ids.__getitem__))}
    return json.dumps(described)
