"""First questions of an audit: which model, which APIs, and what each of them can do."""

from typing import Any

from holdfast.cluster.verify.exchange import Answer, Ask
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.subject import Api, Feature, Steps, Subject

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
