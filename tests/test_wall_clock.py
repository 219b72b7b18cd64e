"""Who reads the wall clock, which may jump: each place, with its reason. No duration and no deadline is made of it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.worker.timers import WallClock

ROOT = Path(__file__).parents[1]
PACKAGES = ("worker", "router", "cluster")

READ_BY = {
    "cluster/client/submissions.py": "a chat's template may write the date into its prompt; it is fixed once",
    "cluster/commands/bench.py": "the date of a report",
    "cluster/commands/bench_flags.py": "a seed",
    "cluster/offline/request_handle.py": "arrival_time of vLLM's metrics; what is measured is monotonic",
    "cluster/commands/verify.py": "the date of a report",
    "cluster/serve/directory.py": "the first version of a directory; versions are compared by whether they differ",
    "cluster/serve/examination.py": "whether a certificate has expired",
    "cluster/serve/node_drain.py": "Ray takes a node's deadline since 1970",
    "router/api/http/batches.py": "`created_at` and `expires_at` of OpenAI's objects, which outlive processes",
    "router/api/http/message_batches.py": "`created_at` of Anthropic's objects, which outlive processes",
    "router/api/http/conversations.py": "`created_at` of OpenAI's objects",
    "router/api/http/files.py": "`created_at` and `expires_at` of OpenAI's objects, which outlive processes",
    "router/api/http/pooling.py": "`created` of vLLM's answers",
    "router/api/http/submission.py": "`created` of OpenAI's answers",
    "router/api/open_inference/model_info.py": "the time of the last inference, in the Open Inference Protocol",
    "router/api/operators.py": "the time of an error",
    "router/api/vllm/servicer.py": "the time of a report, and of the last call, in vLLM's engine protocol",
    "router/requests/tracing.py": "when a span begins; its length is the loop's",
    "router/server/router.py": "once for a `WallClock`, and whether a certificate has expired",
    "router/store/database.py": "leases and ages of stored responses, between processes, hosts and starts of a cluster",
    "router/text/chat.py": "the date in a chat's template",
    "worker/engine/rank_orders.py": "until when blocks are kept, in a store that outlives its host",
    "worker/wire/tls.py": "whether a certificate has expired",
    "worker/replica/hang_supervisor.py": "the time of a line of the log",
    "worker/replica/link_traces.py": "once, for a `WallClock`",
}
"""Nothing here is subtracted from another reading, but for ages and leases of the store."""

WALL = {
    "time": {"time", "time_ns", "gmtime", "localtime", "ctime", "strftime", "asctime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
NAMED = re.compile(rf"\b({'|'.join(sorted(set().union(*WALL.values())))})\b")


def readings(source: str) -> Iterator[str]:
    """What a file names of the wall clock, called or handed on."""
    if not NAMED.search(source):
        return  # to parse it takes longer
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in WALL.get(owner, ()):
                yield f"{owner}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (alias.name for alias in node.names if alias.name in WALL["time"])


def test_the_wall_clock_is_read_where_there_is_a_reason_and_nowhere_else():
    found = {
        str(path.relative_to(ROOT)): names
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if (names := sorted(set(readings(path.read_text()))))
    }
    assert {path: found[path] for path in found.keys() - READ_BY.keys()} == {}, "deadlines take the monotonic clock"
    assert READ_BY.keys() - found.keys() == set(), "it does not read it any more"


@pytest.mark.parametrize("planted", ["import time\nnow = time.time\n", "from time import time\n", "datetime.now(UTC)"])
def test_a_reading_is_found(planted):
    assert list(readings(planted))


def test_native_code_measures_by_a_steady_clock():
    sources = [path for path in (ROOT / "worker/executors/cpu/native").rglob("*") if path.suffix in (".cpp", ".h")]
    assert sources
    for path in sources:
        assert not re.search(r"system_clock|CLOCK_REALTIME|gettimeofday|std::time\b", path.read_text()), path


def test_a_wall_clock_goes_on_by_the_steady_one():
    steady = iter((5.0, 5.0, 7.5))
    clock = WallClock(1000.0, lambda: next(steady))
    assert [clock(), clock()] == [1000.0, 1002.5]
