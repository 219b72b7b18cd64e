"""False alarms of `holdfast verify`: many audits of a cluster of the bundled model, in which nothing may be found.

    python -m benchmarks.false_alarms [--seconds 600] [--at-once 2] [--replicas 1] [--url URL] [--json FILE [--resume]]

Each audit has every check, with prompts that no cache has seen, and fewer and shorter requests than the command's
defaults. Audits run beside each other, so each is also the company of the others. With `--url` a running server is
audited, and nothing is started. With `--resume` the counts of the file are added to. Exit code 1: something was found.
"""

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.serving import serving
from holdfast.cluster.verify.audit import Audit
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.subject import Sizes, Subject
from holdfast.cluster.verify.transport import Budget, Transport


@dataclass(slots=True)
class Figures:
    """Counts over all audits."""

    audits: int = 0
    checks: int = 0
    """Checks that compared answers, over all audits."""
    compared: int = 0
    requests: int = 0
    alarms: int = 0
    """Audits with a fault or a difference."""
    found: list[dict[str, Any]] = field(default_factory=list)
    """Findings of all kinds, notes too."""
    seconds: float = 0.0

    @classmethod
    def resumed(cls, path: Path | None) -> "Figures":
        """The counts of a file, if there is one."""
        return cls(**json.loads(path.read_text())) if path is not None and path.exists() else cls()


def sizes() -> Sizes:
    """Amounts of one audit, which takes about 300 requests."""
    return Sizes(num_prompts=2, num_tokens=8, company=3, pause_s=0.0)


async def audited(url: str, figures: Figures) -> None:
    transport = Transport(url, "", Budget(rate=1e5))
    audit = Audit(subject=Subject(model="", nonce=secrets.token_hex(4), sizes=sizes()))
    try:
        await audit.run(transport)
    finally:
        await transport.close()
    figures.audits += 1
    figures.checks += sum(bool(result.num_compared) and not result.skipped for result in audit.results)
    figures.requests += transport.budget.used_requests
    figures.compared += sum(result.num_compared for result in audit.results)
    figures.alarms += audit.worst in (Kind.FAULT, Kind.DIFFERENCE)
    figures.found += [asdict(one) for one in audit.subject.findings]


async def repeat(url: str, seconds: float, at_once: int, figures: Figures) -> None:
    """Audits one after the other, `at_once` of them beside each other, until the time is over."""
    began_s = time.monotonic()

    async def line() -> None:
        while time.monotonic() - began_s < seconds:
            await audited(url, figures)

    await asyncio.gather(*(line() for _ in range(at_once)))
    figures.seconds += time.monotonic() - began_s


@contextmanager
def server(url: str, replicas: int) -> Iterator[str]:
    if url:
        yield url
        return
    config = HoldfastConfig.model_validate({"cluster": {"replicas": replicas, "port": 0, "http_port": 0}})
    with serving(config, lambda *_: None) as cluster:
        yield f"http://{cluster.http[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--url", default="", help="a running server to audit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="add to the counts of --json")
    options = parser.parse_args()
    figures = Figures.resumed(options.json if options.resume else None)
    with server(options.url, options.replicas) as url:
        asyncio.run(repeat(url, options.seconds, options.at_once, figures))
    print(
        f"{figures.audits} audits, {figures.checks:,} checks, {figures.compared:,} compared answers of "
        f"{figures.requests:,} requests, {figures.alarms} false alarms; {figures.seconds:.0f} s, "
        f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    )
    print(dict(Counter(one["name"] for one in figures.found)))
    if options.json:
        options.json.write_text(json.dumps(asdict(figures), indent=1))
    sys.exit(bool(figures.alarms))


if __name__ == "__main__":
    main()
