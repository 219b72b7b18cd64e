"""Report of a bench in JSON: its schema, which `--compare` reads again. `docs/bench.md` lists the fields."""

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.worker.errors import ConfigurationError

FORMAT: Final = "holdfast-bench/1"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Distribution(Part):
    """Distribution of one metric over the requests (or gaps) that have it, in seconds."""

    count: int = Field(description="values that it is of")
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    quantiles: list[float] = Field(description="101 values: the 0th percentile to the 100th, for curves")


class Moment(Part):
    """One interval of a run's time line."""

    time_s: float = Field(description="its beginning, from the beginning of the run")
    in_flight: float = Field(description="requests that were due and had not ended, on average")
    output_tokens_per_s: float
    completed_per_s: float
    failed_per_s: float


class Request(Part):
    """One request. Times are seconds from the beginning of the run."""

    session: int
    turn: int
    due_s: float = Field(description="when it was to be sent: latencies count from here")
    sent_s: float
    first_s: float | None = Field(description="its first output token")
    last_s: float | None = Field(description="its last output token")
    prompt_tokens: int | None = Field(description="as the server counts; null where it does not say")
    cached_tokens: int | None = Field(None, description="prompt tokens from its caches; null where it does not say")
    output_tokens: int
    error: str | None = Field(description="the kind of its failure; null: it was answered to the end")


class Load(Part):
    """The load of a run: open or closed loop, and its rate or number of users."""

    kind: Literal["closed", "open", "trace", "agents"] = Field(
        description="closed: users who wait for their answers; open: at times of the tool's choice; trace: at recorded "
        "times; agents: sessions of agents, all open at once"
    )
    concurrency: int | None = Field(None, description="users of a closed loop; agents")
    rate: float | None = Field(None, description="sessions a second of an open loop; of a trace, on average")
    arrivals: str | None = Field(None, description="process of an open loop's arrivals")
    burstiness: float | None = None

    @property
    def level(self) -> float:
        return float(self.concurrency or self.rate or 0)

    def __str__(self) -> str:
        if self.kind == "closed":
            return f"{self.concurrency} at a time"
        if self.kind == "agents":
            return f"{self.concurrency} agents"
        return f"{self.rate:.4g}/s, {self.arrivals if self.kind == 'open' else 'trace'}"


class Turns(Part):
    """Conversations of a run: completed requests alone."""

    sessions: int
    sessions_kept: int | None = Field(
        description="those in which each turn found at least nine tenths of the prompt of the turn before in a cache"
    )
    cached_tokens: int | None = Field(description="prompt tokens from the server's caches; null: it does not say")
    hit_rate: float | None = Field(description="cached_tokens / prompt_tokens")
    seen_rate: float | None = Field(
        None,
        description="share of the prompt tokens that were prompt or output of the session's turn before: the most that "
        "its cache can have",
    )
    first_ttft_s: Distribution | None = Field(description="TTFT of first turns")
    later_ttft_s: Distribution | None = Field(description="TTFT of later turns")


class Run(Part):
    """One load and the server's results under it."""

    load: Load
    interrupted: bool = Field(
        False, description="the run was interrupted: requests in flight are not counted, so long answers are missing"
    )
    duration_s: float = Field(description="from the beginning to the end of the last request, and at least --duration")
    requests: int
    completed: int
    failed: int
    errors: dict[str, int] = Field(description="failed requests by kind of error")
    error_examples: dict[str, str] = Field(description="the first message of each kind")
    prompt_tokens: int = Field(description="of completed requests")
    output_tokens: int = Field(description="of completed requests")
    requests_per_s: float = Field(description="completed requests / duration_s")
    output_tokens_per_s: float
    total_tokens_per_s: float = Field(description="prompt and output tokens / duration_s")
    good: int | None = Field(description="completed requests that kept to the SLO; null without one")
    goodput: float | None = Field(description="good / duration_s")
    attainment: float | None = Field(description="good / requests")
    ttft_s: Distribution | None = Field(description="time to first token, from when the request was due")
    tpot_s: Distribution | None = Field(description="time per output token after the first")
    itl_s: Distribution | None = Field(
        description="inter-token latency: gaps between pieces of output, of all requests"
    )
    e2e_s: Distribution | None = Field(description="from when the request was due to its last token")
    lateness_s: Distribution | None = Field(
        description="how long after it was due a request was sent: the tool's own wait"
    )
    turns: Turns | None = Field(None, description="null: no session had a second turn")
    timeline: list[Moment]
    each_request: list[Request]


class Settings(Part):
    """Settings of a run: the target and the requests sent to it."""

    server: str
    protocol: str
    model: str
    prompt_tokens: str = Field(description="distribution of lengths, as given on the command line")
    output_tokens: str
    prefixes: int
    prefix_tokens: int
    turns: int
    think_s: float
    agent_pauses: float | None = Field(None, description="factor on the pauses of agents; null: no agents")
    trace: str | None
    seed: int = Field(description="of lengths and arrivals")
    text_seed: int = Field(description="of the words: another one for each bench, so that no cache knows the prompts")
    warmup: int
    slo: str | None
    attainment_wanted: float = Field(description="share of requests within the SLO that makes a load fine")
    tokens_per_word: float | None = Field(description="as calibrated on the server; null: it counts no tokens")


class Try(Part):
    """One load of a search."""

    load: float
    attainment: float
    is_fine: bool


class Search(Part):
    """The search for the highest load within the SLO (--find-max)."""

    of: Literal["rate", "concurrency"]
    best: float | None = Field(description="the highest load that was fine; null: none was")
    tries: list[Try]


class Machine(Part):
    """The machine that made the load."""

    cpus: int
    load_average: float
    python: str
    holdfast: str


class Report(Part):
    """A whole bench."""

    format: Literal["holdfast-bench/1"] = FORMAT
    began_at: str = Field(description="ISO 8601, UTC")
    machine: Machine
    settings: Settings
    runs: list[Run]
    search: Search | None = None

    def write(self, path: Path) -> None:
        """Writes the report as JSON. Raises ConfigurationError where the file cannot be written."""
        try:
            path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--json {path}: cannot be written ({error.strerror})") from error


def read_report(path: Path) -> Report:
    """Raises `ConfigurationError` for a file that is not a report."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"--compare {path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(f"--compare {path}: no report of `holdfast bench`: {where}: {first['msg']}") from error
