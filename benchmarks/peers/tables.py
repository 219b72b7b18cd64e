"""Tables of the results, for the terminal and as markdown: rates, ratios, splits and the facts of each server.

Form alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.table import Table

from benchmarks.peers.cases import CASES
from benchmarks.peers.peers import PEERS
from benchmarks.peers.results import CaseResult, Comparison, ModelResult, ServerFacts, Spread, parts_of

_MIN_FIRST_CHOICE = 0.9
"""A server below it computes something else: it is marked."""
_MAX_CACHED_BYTES = 256 << 20
"""Smaller weights may stay in a core's caches: memory does not bound them."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table before it has a form."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), ""])

    def rich(self) -> Table:
        table = Table(*self.columns, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*(cell.replace("**", "") for cell in row))
        return table


def sheets(model: str, result: ModelResult, ours: str, bandwidth_gb_s: float | None) -> list[Sheet]:
    """All tables of one model. `ours` is the name of our server."""
    made = [
        _rates(model, result, ours, bandwidth_gb_s),
        _ratios(model, result, ours),
        _kept(model, result, ours),
        _splits(model, result, ours),
        _facts(model, result),
    ]
    return [sheet for sheet in made if sheet.rows]


def legend(results: Iterable[ModelResult], noise: float) -> str:
    """How to read the tables, and how many rounds were dropped."""
    cases = [case for result in results for case in result.cases.values()]
    names = dict.fromkeys(name for result in results for name in result.cases)
    titles = "; ".join(f"{name}: {CASES[name].title}" for name in names if name in CASES)
    dropped = sum(case.num_dropped for case in cases)
    return (
        f"{titles}. Medians [least..most]. {dropped} rounds were dropped and repeated because other processes took "
        f"more than {noise:.0%} of the machine; ~: kept although they did; 1st: too slow for a run after its warm-up; "
        f"!: greedy ids that are not the model's."
    )


def _rates(model: str, result: ModelResult, ours: str, bandwidth_gb_s: float | None) -> Sheet:
    peers = [name for name in result.servers if name != ours]
    rows = [[f"**{ours}**", *(_spread(case.our_rate) for case in result.cases.values())]]
    rows += [[_marked(name, result), *_cells(result, name, lambda one: _spread(one.rate))] for name in peers]
    if bandwidth_gb_s and "a" in result.cases and result.weight_bytes > _MAX_CACHED_BYTES:
        rows.append(_bandwidth_row(result, bandwidth_gb_s))
    return Sheet(f"{model}: output tokens/s", ["server", *result.cases], rows)


def _ratios(model: str, result: ModelResult, ours: str) -> Sheet:
    peers = [name for name in result.servers if name != ours]
    rows = [[name, *_cells(result, name, lambda one: _spread(one.ratio, digits=2))] for name in peers]
    if peers:
        rows.append(["**best peer**", *(_best(case) for case in result.cases.values())])
    return Sheet(f"{model}: {ours} over each peer, run beside run", ["peer", *result.cases], rows)


def _kept(model: str, result: ModelResult, ours: str) -> Sheet:
    """Of servers on a network: their rates over the offline rates of the same engines, each as a ratio to ours."""
    rows = []
    for name in result.servers:
        offline = PEERS[name].serves if name in PEERS else ""
        if offline == ours or offline in result.servers:
            rows.append([name, offline, *(_share(case, name, offline) for case in result.cases.values())])
    return Sheet(f"{model}: share of its offline rate that a server keeps", ["server", "offline", *result.cases], rows)


def _share(case: CaseResult, server: str, offline: str) -> str:
    """A server's ratio to ours, over that of its engine offline (1, where that is ours)."""
    served, alone = case.comparisons.get(server), case.comparisons.get(offline)
    if served is None or served.ratio is None or (alone is not None and alone.ratio is None):
        return ""
    return f"{(alone.ratio.median if alone is not None and alone.ratio else 1.0) / served.ratio.median:.0%}"


def _splits(model: str, result: ModelResult, ours: str) -> Sheet:
    """Milliseconds of a burst; ours from a burst of its own, which callbacks make a little slower."""
    peers = [name for name in result.servers if name != ours]
    rows = [[ours, *(_parts(case.our_parts, 1) for case in result.cases.values())]]
    for name in peers:
        cells = []
        for case in result.cases.values():
            one = case.comparisons.get(name, Comparison())
            num_bursts = 1 if one.is_first_run else case.num_bursts
            cells.append(_parts(parts_of([pair.theirs for pair in one.pairs]), num_bursts))
        rows.append([name, *cells])
    return Sheet(f"{model}: prefill / decode of a burst, ms", ["server", *result.cases], rows)


def _facts(model: str, result: ModelResult) -> Sheet:
    columns = ["server", "start s", "peak MiB", "idle cores", "first choice", "largest gap", "versions"]
    return Sheet(f"{model}: servers", columns, [_fact_row(name, facts) for name, facts in result.servers.items()])


def _fact_row(name: str, facts: ServerFacts) -> list[str]:
    versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
    if facts.error:
        return [name, *[""] * 5, f"left out: {' '.join(facts.error.split())[:200]}"]
    check = [f"{facts.check['first_choice']:.3f}", f"{facts.check['largest_gap']:.3f}"] if facts.check else ["", ""]
    figures = [f"{facts.start_s:.1f}", str(facts.peak_memory_mib), f"{facts.idle_share:.0%}"]
    return [name, *figures, *check, versions]


def _cells(result: ModelResult, peer: str, show: Callable[[Comparison], str]) -> list[str]:
    """One cell a case, with its marks."""
    cells = []
    for case in result.cases.values():
        one = case.comparisons.get(peer)
        if one is None:
            cells.append("")
        elif not one.pairs:
            cells.append("failed" if one.error else "")
        else:
            marks = [mark for mark, is_set in (("~", one.is_noisy), ("1st", one.is_first_run)) if is_set]
            cells.append(" ".join([show(one), *marks]))
    return cells


def _marked(name: str, result: ModelResult) -> str:
    check = result.servers[name].check
    return f"{name} !" if check and check["first_choice"] < _MIN_FIRST_CHOICE else name


def _best(case: CaseResult) -> str:
    if (best := case.best_peer) is None:
        return ""
    one = case.comparisons[best]
    return f"**{one.ratio.median:.2f}** ({best})" if one.ratio is not None else ""


def _bandwidth_row(result: ModelResult, bandwidth_gb_s: float) -> list[str]:
    """What reading the weights once a token allows at most, for one request."""
    limit = bandwidth_gb_s * 1e9 / result.weight_bytes
    rate = result.cases["a"].our_rate
    share = f", ours reach {rate.median / limit:.0%}" if rate is not None else ""
    cell = f"{limit:.1f} at {bandwidth_gb_s:.1f} GB/s{share}"
    return ["memory's limit", *(cell if name == "a" else "" for name in result.cases)]


def _parts(parts: dict[str, float], num_bursts: int) -> str:
    if "prefill" not in parts:
        return ""
    return " / ".join(f"{parts[name] / num_bursts * 1e3:.0f}" for name in ("prefill", "decode"))


def _spread(spread: Spread | None, digits: int | None = None) -> str:
    if spread is None:
        return ""
    figures = (spread.median, spread.least, spread.most)
    median, least, most = (f"{x:,.{_digits(x) if digits is None else digits}f}" for x in figures)
    return f"{median} [{least}..{most}]"


def _digits(figure: float) -> int:
    return 0 if figure >= 100 else 1
