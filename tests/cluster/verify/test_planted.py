"""Every planted fault is found by its name, and a server without faults has no finding."""

import asyncio
import math
import re
from pathlib import Path

import pytest

from holdfast.cluster.verify.audit import ALL, Audit
from holdfast.cluster.verify.subject import Sizes, Subject
from holdfast.cluster.verify.transport import Budget, Transport
from tests.cluster.verify.planted import OTHER, ZERO, Planted

FAULTS = {
    "mixes streams": ("purity", "streams.mixed"),
    "drops a byte": ("purity", "streams.lost-text"),
    "repeats a chunk": ("purity", "streams.repeated-text"),
    "stale cache": ("purity", "answers.of-another"),
    "varies": ("purity", "purity.repeated"),
    "cold differs": ("purity", "purity.cached"),
    "depends on the batch": ("purity", "purity.batched"),
    "n differs": ("purity", "purity.n"),
    "logprobs change it": ("purity", "purity.plain"),
    "drifts": ("purity", "logprobs.drift"),
    "ignores seeds": ("seeded", "seed.ignored"),
    "one seed": ("seeded", "seed.no-effect"),
    "drawn n differs": ("seeded", "seeded.n"),
    "wrong finish": ("finish", "finish.wrong"),
    "wrong usage": ("finish", "usage.wrong"),
    "wrong streamed usage": ("finish", "usage.wrong"),
    "another tokenizer": ("tokenizer", "usage.tokenizer"),
    "ignores stop": ("stop", "stop.ignored"),
    "stops late": ("stop", "stop.wrong-place"),
    "finish of a stop": ("stop", "stop.wrong-place"),
    "echo without its beginning": ("echo", "echo.wrong"),
    "echo with another end": ("echo", "echo.other-text"),
    "truncates logprobs": ("logprobs", "logprobs.truncated"),
    "truncates top logprobs": ("logprobs", "logprobs.truncated"),
    "sums above 1": ("logprobs", "logprobs.sum"),
    "not the likeliest": ("logprobs", "logprobs.not-chosen"),
    "hides the chosen token": ("logprobs", "logprobs.not-chosen"),
    "cuts characters": ("unicode", "unicode.broken"),
    "breaks characters in streams": ("unicode", "unicode.broken"),
    "bytes that are no text": ("streams", "streams.form"),
    "unfinished streams": ("streams", "streams.unfinished"),
    "two ids": ("streams", "streams.form"),
    "500 for bad JSON": ("errors", "errors.status"),
    "accepts anything": ("errors", "errors.accepted"),
    "cuts prompts": ("limits", "limits.prompt-cut"),
    "keeps cancelled work": ("cancel", "cancel.slot-kept"),
    "ignores schemas": ("structured", "structured.invalid"),
    "mangles arguments": ("tools", "tools.unparsable"),
    "mangles streamed arguments": ("tools", "tools.streamed"),
    "swaps adapters": ("adapters", "adapters.swapped"),
    "adapter of no zero": ("adapters", "adapters.zero-differs"),
    "drawn adapter of no zero": ("adapters", "adapters.zero-differs"),
    "adapter without effect": ("adapters", "adapters.no-effect"),
    "!!!!": ("purity", "numbers.repeated-token"),
    "NaN": ("logprobs", "numbers.not-finite"),
}


def audited(fault="", checks=ALL, nonce="n0", quick_until=math.inf, **options):
    async def run():
        server = Planted(fault)
        server.quick_until = quick_until
        transport = Transport(
            "http://server", "", options.pop("budget", Budget(rate=1e6)), inner=server, clock=lambda: server.time_s
        )
        sizes = Sizes(num_prompts=4, num_tokens=16, company=6, pause_s=0.0)
        subject = Subject(model="", nonce=nonce, sizes=sizes, adapters=[OTHER], zero_adapters=[ZERO])
        audit = Audit(subject=subject, checks=checks, **options)
        await audit.run(transport)
        await transport.close()
        return audit

    return asyncio.run(run())


def names(audit, *kinds):
    return {one.name for one in audit.subject.findings if not kinds or one.kind in kinds}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_name(fault):
    check, name = FAULTS[fault]
    assert name in names(audited(fault, [check]))


@pytest.mark.parametrize("nonce", ["a", *(pytest.param(f"b{n}", marks=pytest.mark.slow) for n in range(8))])
def test_a_server_without_faults_has_no_finding(nonce):
    audit = audited(nonce=nonce)
    assert audit.subject.findings == []
    assert all(result.num_compared for result in audit.results if result.name not in ("reach", "numbers"))


@pytest.mark.parametrize("quick_until", range(60))
def test_a_server_that_becomes_slow_keeps_no_cancelled_work(quick_until):
    assert audited(checks=["cancel"], quick_until=quick_until).subject.findings == []


def test_the_page_lists_the_planted_servers():
    page = (Path(__file__).parents[3] / "docs" / "verify.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([\w.-]+)` \| (.+) \|$", page, re.MULTILINE)
    assert {fault: (check, name) for check, name, faults in rows for fault in faults.split(", ")} == FAULTS
    assert f"{len(FAULTS)} planted faults" in page
