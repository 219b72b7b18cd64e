"""Subject of an audit: the known facts of the server, the way to ask it, and the findings. No IO.

A check is a generator: it yields steps, gets the answers of each, and reports findings to its subject.

The first check finds out which model is served, which APIs, and what each of them can do.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

from holdfast.cluster.verify.exchange import Answer, Ask
from holdfast.cluster.verify.finding import Evidence, Finding, Kind
from holdfast.cluster.verify.material import Prompt, fillers, prompts

_SHOWN: Final = 400  # characters


class Api(StrEnum):
    """Endpoint by which a model is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat/completions"


class Feature(StrEnum):
    """Feature that servers may have or not."""

    LOGPROBS = "logprobs"
    SEVERAL = "n"
    ECHO = "echo"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Pause:
    """A step without requests, for this number of seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class During:
    """A step: the requests are sent together, again and again, while a command runs that began in the midst of them."""

    asks: Sequence[Ask]


Step: TypeAlias = "Sequence[Ask] | Pause | During"
"""Requests that are sent together, or one of the others."""
Steps: TypeAlias = Generator[Step, list[Answer], None]
Answers: TypeAlias = Generator[Step, list[Answer], list[Answer]]


def alone(asks: Iterable[Ask]) -> Answers:
    """One request after the other."""
    found: list[Answer] = []
    for ask in asks:
        found += yield [ask]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Amounts that are asked."""

    num_prompts: int = 4
    num_tokens: int = 24
    company: int = 8
    """Requests that are sent together."""
    pause_s: float = 3.0
    num_top: int = 5
    """Likeliest tokens that are asked for at each position."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """The server under audit."""

    model: str
    nonce: str
    sizes: Sizes = field(default_factory=Sizes)
    adapters: Sequence[str] = ()
    zero_adapters: Sequence[str] = ()
    has_key: bool = False
    """Whether a key is sent, so that a wrong one must be refused."""
    max_model_len: int | None = None
    features: dict[Api, set[Feature]] = field(default_factory=dict)
    """Features of each API that answers."""
    findings: list[Finding] = field(default_factory=list)
    num_compared: int = 0

    @property
    def apis(self) -> list[Api]:
        return list(self.features)

    def can(self, api: Api, feature: Feature) -> bool:
        return feature in self.features.get(api, ())

    def prompts(self) -> list[Prompt]:
        return prompts(self.nonce, self.sizes.num_prompts)

    def ask(self, api: Api, prompt: str, *, logprobs: bool = False, **params: Any) -> Ask:
        """A request at temperature 0 with the audit's number of tokens, unless `params` say otherwise."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": self.sizes.num_tokens}
        if api is Api.CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if logprobs and self.can(api, Feature.LOGPROBS):
            top = self.sizes.num_top
            body |= {"logprobs": True, "top_logprobs": top} if api is Api.CHAT else {"logprobs": top}
        return Ask(path=api.value, body=body | params)

    def streamed(self, ask: Ask) -> Ask:
        """The same request as a stream, with usage at its end."""
        body = {**ask.params, "stream": True, "stream_options": {"include_usage": True}}
        return Ask(path=ask.path, body=body, cut_after=ask.cut_after)

    def company(self, api: Api, number: int, **params: Any) -> list[Ask]:
        """Other requests, `number` of them, of different lengths."""
        longer = {"max_tokens": 2 * self.sizes.num_tokens} | params
        return [self.ask(api, text, **longer) for text in fillers(self.nonce, number)]

    def found(self, name: str, kind: Kind, about: str, answer: Answer | None = None, **details: Any) -> None:
        """`answer` shows it; `details` are fields of `Finding`, and `expected` and `seen`, texts for its evidence."""
        expected, seen = details.pop("expected", ""), details.pop("seen", None)
        evidence = None if answer is None else evidence_of(answer, expected, seen)
        self.findings.append(Finding(name=name, kind=kind, about=about, evidence=evidence, **details))

    def examine(
        self,
        name: str,
        about: str,
        answers: Iterable[Answer],
        problem: Callable[[Answer], str],
        kind: Kind = Kind.FAULT,
    ) -> None:
        """One finding, if `problem` says something (in a few words) of any of the answers."""
        known = [answer for answer in answers if answer.is_ok]
        self.num_compared += len(known)
        wrong = [(answer, text) for answer in known if (text := problem(answer))]
        if wrong:
            first, text = wrong[0]
            self.found(name, kind, f"{about}: {text}", first, num_seen=len(wrong), num_tried=len(known), expected=about)


def evidence_of(answer: Answer, expected: str, seen: str | None = None) -> Evidence:
    """`seen`: what came; unset, the answer's own text or error."""
    if seen is None:
        seen = answer.choice.full if answer.choices else f"{answer.status} {answer.message}"
    request: Mapping[str, Any] = answer.ask.params
    if isinstance(answer.ask.body, bytes):
        request = {"body": answer.ask.body.decode(errors="replace")}
    return Evidence(path=answer.ask.path, request=_shortened(request), expected=expected[:_SHOWN], found=seen[:_SHOWN])


def _shortened(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request as it was sent, unless it is long: a report that is shared should show it, and stay readable."""
    text = json.dumps(request, ensure_ascii=False)
    if len(text) <= 4 * _SHOWN:
        return request
    return {key: value if len(str(value)) <= _SHOWN else f"{str(value)[:_SHOWN]} ..." for key, value in request.items()}


_FEW = 4  # tokens


def reach(subject: Subject) -> Steps:
    """Fills the subject's model, length and features; without any API a fault."""
    (models,) = yield [Ask(path="models", method="GET", is_valid=False)]
    _take_models(subject, models.body)
    failed = []
    for api in Api:
        subject.features[api] = set()
        (answer,) = yield [subject.ask(api, f"Hello {subject.nonce}", max_tokens=_FEW)]
        if not answer.is_ok:
            del subject.features[api]
            failed.append(answer)
            continue
        yield from _features(subject, api)
    for answer in failed:
        about = f"{answer.ask.path} is not offered: {answer.status or 'no answer'} {answer.message}".rstrip()
        subject.found("api.missing", Kind.NOTE if subject.apis else Kind.FAULT, about, answer)


def _take_models(subject: Subject, body: Any) -> None:
    entries = body.get("data") if isinstance(body, dict) else None
    known = {str(one.get("id")): one for one in entries or () if isinstance(one, dict)}
    if not subject.model and known:
        subject.model = next(iter(known))
    entry = known.get(subject.model, {})
    for value in (entry.get("max_model_len"), entry.get("context_length"), (entry.get("meta") or {}).get("n_ctx")):
        if isinstance(value, int) and subject.max_model_len is None:
            subject.max_model_len = value


def _features(subject: Subject, api: Api) -> Steps:
    subject.features[api] = {Feature.LOGPROBS}  # so that it is asked for
    prompt = f"Hello again {subject.nonce}"
    (logprobs,) = yield [subject.ask(api, prompt, logprobs=True, max_tokens=_FEW)]
    (several,) = yield [subject.ask(api, prompt, n=2, max_tokens=_FEW)]
    (stream,) = yield [subject.streamed(subject.ask(api, prompt, max_tokens=_FEW))]
    offered = {
        Feature.LOGPROBS: logprobs.is_ok and bool(logprobs.choice.tokens),
        Feature.SEVERAL: several.is_ok and len(several.choices) == 2,
        Feature.STREAM: stream.is_ok,
        Feature.ECHO: False,
    }
    if api is Api.COMPLETIONS:
        (echo,) = yield [subject.ask(api, prompt, echo=True, max_tokens=_FEW)]
        offered[Feature.ECHO] = echo.is_ok and len(echo.choice.text) > _FEW and subject.nonce in echo.choice.text
    subject.features[api] = {feature for feature, is_there in offered.items() if is_there}
    _say_missing(subject, api, offered, [logprobs, several, stream])


def _say_missing(subject: Subject, api: Api, offered: dict[Feature, bool], answers: list[Answer]) -> None:
    missing = [feature.value for feature, is_there in offered.items() if not is_there]
    if api is Api.CHAT:
        missing.remove(Feature.ECHO)
    if missing:
        reasons = {f"{answer.status} {answer.message}"[:120] for answer in answers if not answer.is_ok}
        about = f"{api.value}: not offered: {', '.join(missing)}{f' ({chr(59).join(reasons)})' if reasons else ''}"
        subject.found("api.missing", Kind.NOTE, about)
