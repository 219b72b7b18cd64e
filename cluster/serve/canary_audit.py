"""Audit of a canary by the checks of `holdfast verify`: with request ids of its share, and its answers alone."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from holdfast.cluster.verify.audit import Audit
from holdfast.cluster.verify.exchange import Answer, Ask
from holdfast.cluster.verify.finding import Finding, Kind
from holdfast.cluster.verify.subject import Sizes, Subject
from holdfast.cluster.verify.transport import Budget, Transport
from holdfast.router.dispatch.versions import position
from holdfast.worker.model_info import version_of

NUM_ASKED: Final = 5
"""Maximum number of times that a question is asked until the canary answers it: the canary may be full."""

CHECKS: Final = ("purity", "seeded", "finish", "stop", "logprobs", "unicode", "streams", "structured")
_SIZES: Final = Sizes(num_prompts=3, num_tokens=16, company=4, pause_s=0.0)


def own_id(share: float) -> str:
    """A new request id that falls into the share, in (0, 1], of a canary."""
    while True:
        request_id = f"canary-{uuid4().hex}"
        if position(request_id) < share:
            return request_id


class CanaryTransport(Transport):
    """Transport whose requests fall into a canary's share. An answer of another version is asked again, then void."""

    def __init__(self, url: str, key: str, version: str, share: float, **options: Any) -> None:
        super().__init__(url, key, Budget(rate=200.0), **options)
        self._version, self._share = version, share
        self.num_of_canary = 0

    async def send(self, asks: Sequence[Ask], on_first: Callable[[], None] = lambda: None) -> list[Answer]:
        answers = await super().send([self._pinned(ask) for ask in asks], on_first)
        for _ in range(NUM_ASKED - 1):
            again = [n for n, answer in enumerate(answers) if answer.is_ok and not self._is_of_canary(answer)]
            if not again:
                break
            for n, answer in zip(again, await super().send([self._pinned(asks[n]) for n in again]), strict=True):
                answers[n] = answer
        for answer in answers:
            if self._is_of_canary(answer):
                self.num_of_canary += 1
            else:
                answer.choices = []
        return answers

    def _pinned(self, ask: Ask) -> Ask:
        if not ask.params:
            return ask
        return Ask(path=ask.path, body={**ask.params, "request_id": own_id(self._share)}, cut_after=ask.cut_after)

    def _is_of_canary(self, answer: Answer) -> bool:
        return version_of(answer.fingerprint) == self._version


@dataclass(frozen=True, slots=True)
class CanaryAudit:
    """Result of an audit."""

    found: list[str]
    """Faults and differences, each in a few words."""
    num_answers: int
    """Answers of the canary; 0: it never had room, so nothing is known of it."""


def audited(address: str, key: str, model: str, version: str, share: float, **options: Any) -> CanaryAudit:
    """Audits the version's answers. `address` is a router's, with its scheme; `options` are those of `Transport`."""

    async def run() -> tuple[Sequence[Finding], int]:
        transport = CanaryTransport(address, key, version, share, **options)
        audit = Audit(subject=Subject(model=model, nonce=uuid4().hex[:6], sizes=_SIZES), checks=CHECKS)
        try:
            await audit.run(transport)
        finally:
            await transport.close()
        return audit.subject.findings if transport.num_of_canary else (), transport.num_of_canary

    findings, num_answers = asyncio.run(run())
    return CanaryAudit([f"{one.name}: {one.about}" for one in findings if one.kind is not Kind.NOTE], num_answers)
