"""Audit: runs the checks over a transport, and collects their findings."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from holdfast.cluster.verify import company, counts, numbers, protocol, purity, semantics, structured
from holdfast.cluster.verify.exchange import Answer
from holdfast.cluster.verify.finding import CheckResult, Kind
from holdfast.cluster.verify.subject import Api, During, Pause, Steps, Subject, reach
from holdfast.cluster.verify.transport import BudgetExceeded, Transport

CHECKS: Final[Mapping[str, Callable[[Subject, Api], Steps]]] = {
    "purity": purity.greedy,
    "seeded": purity.seeded,
    "finish": semantics.finishes,
    "tokenizer": counts.tokenizer,
    "stop": semantics.stops,
    "echo": semantics.echoes,
    "logprobs": semantics.logprobs,
    "unicode": semantics.unicode_cuts,
    "streams": protocol.streams,
    "errors": protocol.errors,
    "limits": protocol.limits,
    "cancel": protocol.cancellations,
    "structured": structured.schemas,
    "tools": structured.tools,
    "adapters": company.adapters,
}
"""Checks by name, for each API that the server has; `numbers` and `during` are asked for by their own settings."""

ALL: Final = (*CHECKS, "numbers", "during")


@dataclass(slots=True, kw_only=True)
class Audit:
    """Checks to run on a subject, and their results."""

    subject: Subject
    checks: Sequence[str] = ALL
    reference: Mapping[str, Any] | None = None
    tolerance: float = 0.02
    """Share by which perplexities may differ from the reference's."""
    command: Callable[[], bool] | None = None
    """Begins what happens during streams at its first call; says whether it still goes on."""
    measured: dict[str, Any] = field(default_factory=dict)
    results: list[CheckResult] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def worst(self) -> Kind | None:
        return min((one.worst for one in self.results if one.worst), key=list(Kind).index, default=None)

    async def run(self, transport: Transport, report: Callable[[str], None] = lambda name: None) -> None:
        """Never raises for a fault of the server: that is a finding. Cancelled, it has the results so far."""
        began_s = time.monotonic()
        try:
            for name, make in self._plan():
                report(name)
                await self._check(name, make, transport)
                if name == "reach" and not self.subject.apis:
                    break
        finally:
            self._over_all()
            self.seconds = time.monotonic() - began_s

    def _plan(self) -> Sequence[tuple[str, Callable[[], Steps]]]:
        """Checks in their order. Their APIs are known when they begin, so they are made late."""
        subject, known = self.subject, list(self.checks)
        plan: list[tuple[str, Callable[[], Steps]]] = [("reach", partial(reach, subject))]
        plan += [(name, partial(self._for_each_api, CHECKS[name])) for name in CHECKS if name in known]
        if "numbers" in known:
            plan.append(("numbers", self._numbers))
        if "during" in known and self.command is not None:
            plan.append(("during", partial(self._for_each_api, company.during)))
        return plan

    def _for_each_api(self, check: Callable[[Subject, Api], Steps]) -> Steps:
        for api in self.subject.apis:
            yield from check(self.subject, api)

    def _numbers(self) -> Steps:
        for api in self.subject.apis:
            yield from numbers.measure(self.subject, api, self.measured)
        if self.reference is not None:
            numbers.compare(self.subject, self.measured, self.reference, self.tolerance)

    async def _check(self, name: str, make: Callable[[], Steps], transport: Transport) -> None:
        subject, began_s = self.subject, time.monotonic()
        before = len(subject.findings), subject.num_compared, transport.budget.used_requests
        skipped = ""
        try:
            await self._perform(make(), transport)
        except BudgetExceeded as spent:
            skipped = str(spent)
        self.results.append(
            CheckResult(
                name=name,
                findings=tuple(subject.findings[before[0] :]),
                skipped=skipped,
                num_requests=transport.budget.used_requests - before[2],
                num_compared=subject.num_compared - before[1],
                seconds=time.monotonic() - began_s,
            )
        )

    async def _perform(self, steps: Steps, transport: Transport) -> None:
        step = next(steps, None)
        while step is not None:
            answers: list[Answer] = []
            match step:
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                case During(asks):
                    answers = await self._during(asks, transport)
                case asks:
                    answers = await transport.send(asks) if asks else []
            self.answers += answers
            try:
                step = steps.send(answers)
            except StopIteration:
                return

    async def _during(self, asks: Sequence[Any], transport: Transport) -> list[Answer]:
        """Streams again and again until the command is over, and once more after it."""
        begun, found, is_last = False, [], False

        def begin() -> None:
            nonlocal begun
            if not begun and self.command is not None:
                begun = True
                self.command()

        while True:
            found += await transport.send(asks, begin)
            if is_last or self.command is None or not begun:
                return found
            is_last = not self.command()

    def _over_all(self) -> None:
        """Findings over all answers: errors of the server, and numbers that have gone wrong."""
        before = len(self.subject.findings)
        protocol.server_errors(self.subject, self.answers)
        numbers.smells(self.subject, self.answers)
        findings = tuple(self.subject.findings[before:])
        self.results.append(CheckResult(name="health", findings=findings, num_compared=len(self.answers)))
