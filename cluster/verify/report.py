"""Report of an audit for machines: JSON, JUnit's XML, and Prometheus's text. None of them has a key."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from holdfast.cluster.verify.audit import Audit
from holdfast.cluster.verify.finding import CheckResult, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An audit that is over, and where and when it was made."""

    server: str
    model: str
    began_at: str
    version: str
    seconds: float
    num_requests: int
    num_tokens: int
    results: tuple[CheckResult, ...]
    secret: str = ""
    """A text that is never written."""

    @classmethod
    def of(
        cls, audit: Audit, *, server: str, began_at: str, version: str, spent: tuple[int, int], secret: str
    ) -> "Report":
        """`spent`: requests, and output tokens."""
        return cls(
            server=server,
            model=audit.subject.model,
            began_at=began_at,
            version=version,
            seconds=audit.seconds,
            num_requests=spent[0],
            num_tokens=spent[1],
            results=tuple(audit.results),
            secret=secret,
        )

    @property
    def counts(self) -> Counter[Kind]:
        return Counter(one.kind for result in self.results for one in result.findings)

    @property
    def num_compared(self) -> int:
        return sum(result.num_compared for result in self.results)

    def fails(self, least: Kind) -> bool:
        """Whether there is a finding of this kind, or of a heavier one."""
        kinds = list(Kind)
        return any(kinds.index(kind) <= kinds.index(least) for kind in self.counts)

    def without_secret(self, text: str) -> str:
        return text.replace(self.secret, "[key]") if self.secret else text

    def as_json(self) -> str:
        """The report as JSON without the API key."""
        fields = {key: value for key, value in asdict(self).items() if key != "secret"}
        fields["counts"] = {kind.value: self.counts[kind] for kind in Kind}
        return self.without_secret(json.dumps(fields, indent=1, ensure_ascii=False))

    def as_junit(self) -> str:
        """Every check is a test case; faults and differences are its failures."""
        failed = sum(result.worst in (Kind.FAULT, Kind.DIFFERENCE) for result in self.results)
        skipped = sum(bool(result.skipped) for result in self.results)
        counts = {"tests": len(self.results), "failures": failed, "skipped": skipped}
        attributes = {"name": f"holdfast verify {self.server}", "time": f"{self.seconds:.3f}"}
        suite = ElementTree.Element("testsuite", attributes | {key: str(value) for key, value in counts.items()})
        for result in self.results:
            _add_case(suite, result)
        return self.without_secret(ElementTree.tostring(suite, encoding="unicode", xml_declaration=True))

    def as_metrics(self) -> str:
        """Gauges of the last audit."""
        lines = []
        labels = f'server="{_escaped(self.server)}",model="{_escaped(self.model)}"'
        gauges: Mapping[str, tuple[str, dict[str, float]]] = {
            "findings": ("Findings of the last audit.", {f',kind="{kind}"': self.counts[kind] for kind in Kind}),
            "compared": ("Answers that the last audit compared.", {"": self.num_compared}),
            "requests": ("Requests of the last audit.", {"": self.num_requests}),
            "seconds": ("Seconds that the last audit took.", {"": round(self.seconds, 3)}),
        }
        for name, (about, values) in gauges.items():
            lines += [f"# HELP holdfast_verify_{name} {about}", f"# TYPE holdfast_verify_{name} gauge"]
            lines += [f"holdfast_verify_{name}{{{labels}{more}}} {value}" for more, value in values.items()]
        return self.without_secret("\n".join(lines) + "\n")


def _add_case(suite: ElementTree.Element, result: CheckResult) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname="holdfast.verify", name=result.name, time=f"{result.seconds:.3f}"
    )
    for finding in result.findings:
        if finding.kind is not Kind.NOTE:
            failure = ElementTree.SubElement(case, "failure", type=finding.kind.value, message=_xml(finding.name))
            evidence = "" if finding.evidence is None else json.dumps(asdict(finding.evidence), ensure_ascii=False)
            failure.text = _xml(
                f"{finding.about} ({finding.num_seen} of {finding.num_tried}) {finding.cause}\n{evidence}"
            )
    if result.skipped:
        ElementTree.SubElement(case, "skipped", message=_xml(result.skipped))


def _xml(text: str) -> str:
    """The text without characters that XML does not have."""
    return "".join(one if one in "\n\t" or (one >= " " and one not in "\ufffe\uffff") else "?" for one in text)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def write(path: Path, text: str) -> None:
    """Replaces the file at once, so that a collector never reads half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8", errors="replace")
    part.replace(path)


def read_reference(text: str) -> dict[str, Any]:
    """Raises `ValueError` if it is no reference."""
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise ValueError("must be an object of objects, as --write-reference writes it")
    return found
