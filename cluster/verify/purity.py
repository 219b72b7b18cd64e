"""Purity: whether equal requests get equal answers in every situation, at temperature 0 and with seeds.

Known answers of a prompt are the answers to it alone. A situation differs if its answer is not among them. A prompt
whose answers vary when alone is compared no further, so a server is blamed for that only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.cluster.verify.compare import Difference, drift, first_difference, likely_cause
from holdfast.cluster.verify.exchange import Answer, Ask, Choice
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.subject import Api, Feature, Pause, Steps, Subject, alone

HOT: Final = 1.5
"""Temperature of seeded requests: one at which texts of different seeds differ."""

_SHORTEST: Final = 12
"""Characters of a text that two prompts do not have in common by chance."""

DAMAGES: Final = {
    "lost": ("streams.lost-text", "text of the answer is missing"),
    "repeated": ("streams.repeated-text", "text of the answer comes twice"),
    "mixed": ("streams.mixed", "text of another request is in the answer"),
    "changed": ("streams.changed-text", "text within the answer is another one"),
}


@dataclass(slots=True)
class Known:
    """Answers to one prompt, alone."""

    ask: Ask
    is_repetitive: bool
    answers: list[Answer] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        return [choice.full for answer in self.answers for choice in answer.choices]

    def nearest(self, choice: Choice, others: Sequence[str] = ()) -> Difference | None:
        """None: equal to one of them. Otherwise the difference to the known answer with the longest common prefix."""
        found = [first_difference(answer.choice, choice, others) for answer in self.answers]
        if not found or None in found:
            return None
        return max((one for one in found if one), key=lambda one: -1 if one.first_token is None else one.first_token)


@dataclass(slots=True)
class Situation:
    """Judge of one situation: differences of its answers from the known ones, counted."""

    name: str
    prompts: Sequence[Known] = ()
    """All prompts of the check, by whose answers an answer to another request is known."""
    num_tried: int = 0
    num_repetitive: int = 0
    drift: float = 0.0
    seen: list[tuple[Known, Answer, Choice, Difference]] = field(default_factory=list)

    def judge(self, known: Known, answer: Answer, others: Sequence[str] = ()) -> None:
        """Compares each choice of an answer with the known answers."""
        if not answer.is_ok or not known.answers:
            return
        for choice in answer.choices:
            self.num_tried += 1
            self.num_repetitive += known.is_repetitive
            self.drift = max(self.drift, min(drift(one.choice.tokens, choice.tokens) for one in known.answers))
            if difference := known.nearest(choice, others):
                self.seen.append((known, answer, choice, difference))

    def report(self, subject: Subject, family: str) -> None:
        """Reports this situation's findings to `subject`, for a family of requests."""
        subject.num_compared += self.num_tried
        if self.seen:
            damaged = [one for one in self.seen if one[3].damage and self.name in ("streamed", "together", "during")]
            for kind in dict.fromkeys(one[3].damage for one in damaged):
                self._report_as(subject, *DAMAGES[kind], [one for one in damaged if one[3].damage == kind])
            rest = [one for one in self.seen if one not in damaged]
            if exchanged := [one for one in rest if self._is_of_another(one[0], one[2])]:
                self._report_as(subject, "answers.of-another", "the answer to another request came", exchanged)
            if rest := [one for one in rest if one not in exchanged]:
                self._report_differences(subject, family, rest)
        if self.drift > 0:
            about = f"log-probabilities of equal tokens differ by up to {self.drift:.2g} nats ({family}, {self.name})"
            subject.found("logprobs.drift", Kind.NOTE, about, cause="rounding (precision)", gap=self.drift)

    def _is_of_another(self, known: Known, choice: Choice) -> bool:
        """Whether the answer is one to another prompt; of two that came alone, whether either of them is."""
        texts = {choice.full, known.answers[0].choice.full} if self.name in ("cached", "repeated") else {choice.full}
        others = [one for one in self.prompts if one.ask is not known.ask]
        return any(len(text) >= _SHORTEST and text in other.texts for text in texts for other in others)

    def _report_as(self, subject: Subject, name: str, about: str, seen: Sequence[tuple[Any, ...]]) -> None:
        known, answer, choice, difference = seen[0]
        subject.found(
            *(name, Kind.FAULT, f"{about} ({self.name})", answer),
            num_seen=len(seen),
            num_tried=self.num_tried,
            first_token=difference.first_token,
            expected=known.answers[0].choice.full,
            seen=choice.full,
        )

    def _report_differences(self, subject: Subject, family: str, seen: Sequence[tuple[Any, ...]]) -> None:
        known, answer, choice, _ = seen[0]
        gaps = [one[3].gap for one in seen if one[3].gap is not None]
        firsts = [one[3].first_token for one in seen if one[3].first_token is not None]
        only = all(one[0].is_repetitive for one in seen) and 0 < self.num_repetitive < self.num_tried and len(seen) > 1
        gap = max(gaps, default=None)
        subject.found(
            *(f"{family}.{self.name}", Kind.DIFFERENCE, f"{ABOUT[self.name]} got another answer", answer),
            cause=likely_cause(self.name, gap, only_repetitive=only),
            num_seen=len(seen),
            num_tried=self.num_tried,
            first_token=min(firsts, default=None),
            gap=gap,
            expected=known.answers[0].choice.full,
            seen=choice.full,
        )


ABOUT: Final = {
    "repeated": "a request that was sent again, alone,",
    "cached": "a request that was sent again, alone,",
    "batched": "a request among others",
    "copies": "a request among copies of itself",
    "paused": "a request after a pause",
    "streamed": "a streamed request",
    "together": "a streamed request among others",
    "n": "a completion of several of one request",
    "plain": "a request without log-probabilities",
    "during": "a streamed request during the command",
}


def greedy(subject: Subject, api: Api) -> Steps:
    """The family `purity`: temperature 0."""
    yield from _family(subject, api, "purity", lambda n: {})


def seeded(subject: Subject, api: Api) -> Steps:
    """The family `seeded`: a high temperature and a seed for each prompt."""
    yield from _family(subject, api, "seeded", lambda n: {"temperature": HOT, "seed": 1000 + n})
    yield from _seeds_matter(subject, api)


def _family(subject: Subject, api: Api, family: str, params: Callable[[int], dict[str, Any]]) -> Steps:
    known = [
        Known(subject.ask(api, prompt.text, logprobs=True, **params(n)), prompt.is_repetitive)
        for n, prompt in enumerate(subject.prompts())
    ]
    asks = [one.ask for one in known]
    cold = yield from alone(asks)
    warm = yield from alone(asks)
    again = yield from alone(asks)
    _judge_alone(subject, family, known, (cold, warm, again))
    plain = [subject.ask(api, prompt.text, **params(n)) for n, prompt in enumerate(subject.prompts())]
    if plain != asks:
        yield from _situation(subject, family, "plain", known, alone(plain))
    yield from _batches(subject, api, family, known)
    if subject.can(api, Feature.STREAM):
        yield from _situation(subject, family, "streamed", known, alone(subject.streamed(ask) for ask in asks))
        yield from _together(subject, family, known, plain)
    if subject.can(api, Feature.SEVERAL):
        several = [Ask(path=ask.path, body={**ask.params, "n": 2}) for ask in asks]
        if family == "purity":
            yield from _situation(subject, family, "n", known, alone(several))
        else:
            yield from _several_again(subject, family, known, several)
    yield Pause(subject.sizes.pause_s)
    yield from _situation(subject, family, "paused", known, alone(asks))


def _judge_alone(subject: Subject, family: str, known: Sequence[Known], rounds: Sequence[list[Answer]]) -> None:
    """The first, cold answers against the two that may come from a cache."""
    cold, warm, again = rounds
    cached, repeated = Situation("cached", known), Situation("repeated", known)
    unsettled: list[Known] = []
    for one, *answers in zip(known, cold, warm, again, strict=True):
        one.answers = [answer for answer in answers if answer.is_ok]
    for one, first, second, third in zip(known, cold, warm, again, strict=True):
        if len(one.answers) < 3:
            continue
        settled = first_difference(second.choice, third.choice) is None
        reference = Known(one.ask, one.is_repetitive, [first] if settled else [second])
        (cached if settled else repeated).judge(reference, second if settled else third)
        (repeated if settled else cached).num_tried += 1
        if not settled:
            unsettled.append(one)
    if family == "seeded" and len(repeated.seen) * 2 > len(known):
        known_one, answer, choice, difference = repeated.seen[0]
        subject.found(
            *("seed.ignored", Kind.DIFFERENCE, "a request with a seed gets another answer each time", answer),
            num_seen=len(repeated.seen),
            num_tried=len(known),
            first_token=difference.first_token,
            expected=known_one.answers[0].choice.full,
            seen=choice.full,
        )
        repeated.seen.clear()
    cached.report(subject, family)
    repeated.report(subject, family)
    for one in unsettled:
        one.answers = []  # nothing left to compare with


def _situation(subject: Subject, family: str, name: str, known: Sequence[Known], answers: Any) -> Steps:
    """Judges `answers`, a generator of them in the order of `known`."""
    judge = Situation(name, known)
    found: list[Answer] = yield from answers
    for one, answer in zip(known, found, strict=True):
        judge.judge(one, answer)
    judge.report(subject, family)


def _several_again(subject: Subject, family: str, known: Sequence[Known], several: Sequence[Ask]) -> Steps:
    """Several completions of one request, which differ from each other, are the same ones the second time."""
    judge = Situation("n", known)
    first = yield from alone(several)
    second = yield from alone(several)
    for one, before, after in zip(known, first, second, strict=True):
        if one.answers and before.is_ok and after.is_ok:
            for left, right in zip(before.choices, after.choices, strict=False):
                alike = Known(one.ask, one.is_repetitive, [replace(before, choices=[left])])
                judge.judge(alike, replace(after, choices=[right]))
    judge.report(subject, family)


def _batches(subject: Subject, api: Api, family: str, known: Sequence[Known]) -> Steps:
    """Each request among all others and fillers, in two orders; then among copies of itself."""
    batched, copies = Situation("batched", known), Situation("copies", known)
    rest = subject.company(api, max(0, subject.sizes.company - len(known)))
    for order in (known, known[::-1]):
        answers = yield [*(one.ask for one in order), *rest]
        for one, answer in zip(order, answers, strict=False):
            batched.judge(one, answer)
    answers = yield [known[0].ask] * subject.sizes.company
    for answer in answers:
        copies.judge(known[0], answer)
    batched.report(subject, family)
    copies.report(subject, family)


def _together(subject: Subject, family: str, known: Sequence[Known], plain: Sequence[Ask]) -> Steps:
    """All prompts streamed at once, with and without log-probabilities: streams that are mixed up show here."""
    judge = Situation("together", known)
    for asks in ([one.ask for one in known], plain):
        answers = yield [subject.streamed(ask) for ask in asks]
        for one, answer in zip(known, answers, strict=True):
            judge.judge(one, answer, [text for other in known if other is not one for text in other.texts])
    judge.report(subject, family)


def _seeds_matter(subject: Subject, api: Api) -> Steps:
    """Different seeds at a high temperature give different texts somewhere."""
    prompts = subject.prompts()[:2]
    asks = [subject.ask(api, one.text, temperature=HOT, seed=seed) for one in prompts for seed in (1, 2, 3)]
    answers = yield from alone(asks)
    subject.num_compared += len(answers)
    groups = [_texts(answers[n : n + 3]) for n in range(0, len(answers), 3)]
    if all(len(group) == 3 and len(set(group)) == 1 for group in groups):
        about = f"three seeds give one text at temperature {HOT}"
        subject.found("seed.no-effect", Kind.DIFFERENCE, about, answers[1], num_seen=2, num_tried=2)


def _texts(answers: Iterable[Answer]) -> list[str]:
    return [answer.choice.full for answer in answers if answer.is_ok]
