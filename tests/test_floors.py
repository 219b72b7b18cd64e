"""The floors of the house: imports go down only, policy loads no torch, and only the wire files know the stubs."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {"proto": set(), "worker": set(), "router": {"worker"}, "cluster": {"worker", "router"}}
OURS = MAY_IMPORT.keys() | {"holdfast", "tests", "benchmarks", "scripts"}
PLAIN_DATA = {"block_hash", "config", "errors", "model_info", "parameter_types", "progress", "request"}
PLAIN_DATA |= {"sampling_params"}
PLAIN_DATA |= {"structured_outputs", "suspicion"}
POLICY = PLAIN_DATA | {"batching", "block_allocator", "plan", "prefix_cache", "queues", "scheduler", "sequence"}
POLICY |= {"cache_feed", "controls", "deltas", "engine_updates", "fit", "forking", "mailboxes", "prompt_rating"}
POLICY |= {"static_batching", "step_limits"}
POLICY |= {"draws", "grammar_readers"}
POLICY |= {"batching_optimizer", "dial", "stats", "step_time", "step_tuner"}
POLICY |= {"bucketed_batching", "deadlines", "memory_aware_batching", "tenants", "timers", "waiting"}
POLICY |= {"known_answer"}
POLICY |= {"draft_length", "model_drafts", "ngram_drafts", "speculation", "suffix_drafts"}
POLICY |= {"engine_core", "link_session", "suspects"}
PROCESS = {"canary", "engine", "inbox", "link", "rank", "replica", "watchdog"}
PROCESS |= {"guardian", "lifeline", "process_id"}
ROUTER_CORE = {"admission", "config", "deadlines", "dispatch", "events", "fleet", "policy", "prefix_index", "record"}
ROUTER_CORE |= {"beam_search", "circuit_breaker", "parallel_sampling", "placement", "quarantine", "resume"}
ROUTER_CORE |= {"retry_budget"}
ROUTER_CORE |= {"call", "redial", "stream", "switchboard"}
RELATIVE = "a relative import"
STUB_FILES = {"wire", "link_wire", "link", "server", "client"}
DEVICE = {"torch", "transformers", "safetensors", "numpy"}
IO = {"asyncio", "grpc", "ray", "random", "secrets", "socket", "subprocess", "threading", "time"}


def files(package: str, rooms: set[str] | None = None) -> list[Path]:
    """Source files of a package, or those of some of its rooms; rooms that are not built yet are no error."""
    found = sorted(path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)
    return [path for path in found if rooms is None or (path.parent.name == package and path.stem in rooms)]


@cache
def imports(path: Path, *, lazy: bool = True) -> frozenset[str]:
    """Dotted names of what a file imports; without `lazy`, only of what loading it imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    counted = [node for node in nodes if lazy or id(node) not in inside]
    plain = [alias.name for node in counted if isinstance(node, ast.Import) for alias in node.names]
    origins = [node for node in counted if isinstance(node, ast.ImportFrom)]
    return frozenset(plain + [RELATIVE if node.level else node.module for node in origins])


def tops(path: Path, *, lazy: bool = True) -> set[str]:
    return {name.split(".")[0] for name in imports(path, lazy=lazy)}


def rooms_of(package: str, path: Path) -> set[str]:
    """The rooms of a package that a file imports from."""
    return {name.split(".")[1] for name in imports(path) if name.startswith(f"{package}.")}


def test_imports_go_down_only():
    for package, below in MAY_IMPORT.items():
        for path in files(package):
            assert tops(path) & (OURS | {RELATIVE}) <= below | {package}, path


def test_the_worker_knows_no_ray_and_its_policy_neither_torch_nor_io():
    for path in files("worker"):
        assert "ray" not in tops(path), path
    for path in files("worker", POLICY):
        assert not tops(path) & (DEVICE | IO), path
        assert rooms_of("worker", path) <= POLICY, path


def test_what_computes_knows_nothing_of_processes_and_wires():
    for path in set(files("worker")) - set(files("worker", PROCESS)):
        assert not tops(path) & {"asyncio", "grpc", "holdfast.v1"}, path
        assert not rooms_of("worker", path) & PROCESS, path


def test_the_router_takes_plain_data_from_the_worker_and_never_torch_or_ray():
    for path in files("router"):
        assert rooms_of("worker", path) <= PLAIN_DATA, path
        assert not tops(path) & {"torch", "ray"}, path
        assert not tops(path, lazy=False) & DEVICE, path


def test_the_router_core_does_no_io_and_reads_no_clock():
    for path in files("router", ROUTER_CORE):
        assert not tops(path) & IO, path
        assert rooms_of("router", path) <= ROUTER_CORE, path


def test_the_simulator_does_no_io_and_loads_no_torch():
    simulator = sorted((ROOT / "cluster" / "simulate").glob("*.py"))
    assert len(simulator) > 10
    for path in simulator:
        assert not tops(path) & (DEVICE | (IO - {"random"})), path
        assert rooms_of("worker", path) <= POLICY, path


def test_only_wire_files_import_the_stubs():
    for path in [path for package in ("worker", "router", "cluster") for path in files(package)]:
        assert path.stem in STUB_FILES or "holdfast.v1" not in tops(path), path


def test_package_files_are_empty_and_proto_is_no_package():
    for path in [path for package in MAY_IMPORT for path in files(package) if path.name == "__init__.py"]:
        assert path.read_text() == "", path
    assert not (ROOT / "proto" / "__init__.py").exists(), "it would shadow the proto-plus that Ray brings"
