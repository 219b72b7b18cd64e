"""Usage against the tokenizer of the same server: an endpoint that turns a text into tokens counts as usage does."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from holdfast.cluster.verify.exchange import Answer, Ask
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.material import UNICODE
from holdfast.cluster.verify.subject import Api, Step, Steps, Subject, alone

_FEW: Final = 4  # output tokens

Counts: TypeAlias = Generator[Step, list[Answer], list[int]]
"""A part of a check that returns the number of tokens of each text; 0: not known."""

_ENDPOINTS: Final[Sequence[tuple[str, Mapping[str, Any], str]]] = (
    ("/tokenize", {"add_special_tokens": True}, "prompt"),  # Holdfast, vLLM, SGLang
    ("/tokenize", {"add_special": True}, "content"),  # llama.cpp
    ("/extras/tokenize", {}, "input"),  # llama-cpp-python
)
"""Path of an endpoint, its further fields, and the field of the text."""


def tokenizer(subject: Subject, api: Api) -> Steps:
    """Prompt tokens by usage equal those that the server's own tokenizer counts, for prompts and for chats."""
    texts = [*(one.text for one in subject.prompts()), f"{subject.nonce} {UNICODE}"]
    counts = yield from _counts(subject, api, texts)
    if not any(counts):
        about = f"{api.value}: no endpoint tokenizes its prompts, so usage was not compared with the tokenizer"
        subject.found("tokenizer.missing", Kind.NOTE, about)
        return
    answers = yield from alone(subject.ask(api, text, max_tokens=_FEW) for text in texts)
    expected = {id(answer): count for answer, count in zip(answers, counts, strict=True)}
    subject.examine(
        "usage.tokenizer",
        "usage counts the prompt's tokens as the server's tokenizer does",
        [answer for answer in answers if expected[id(answer)]],
        lambda answer: _other_count(answer, expected[id(answer)]),
    )


def _other_count(answer: Answer, count: int) -> str:
    said = answer.tokens_of("prompt")
    return "" if said in (None, count) else f"prompt_tokens {said}, and {count} by the tokenizer"


def _counts(subject: Subject, api: Api, texts: Sequence[str]) -> Counts:
    if api is Api.CHAT:
        bodies = [{"model": subject.model, "messages": subject.ask(api, text).params["messages"]} for text in texts]
        return (yield from _asked([Ask(path="/tokenize", body=body, is_valid=False) for body in bodies]))
    for path, fields, name in _ENDPOINTS:
        asks = [Ask(path=path, body={"model": subject.model, name: text, **fields}, is_valid=False) for text in texts]
        counts = yield from _asked(asks)
        if any(counts):
            return counts
    return [0] * len(texts)


def _asked(asks: Sequence[Ask]) -> Counts:
    first = yield asks[:1]
    if not _count(first[0]):
        return [0] * len(asks)
    rest = yield from alone(asks[1:])
    return [_count(answer) for answer in (*first, *rest)]


def _count(answer: Answer) -> int:
    tokens = answer.body.get("tokens") if isinstance(answer.body, dict) and answer.status == 200 else None
    return len(tokens) if isinstance(tokens, list) else 0
