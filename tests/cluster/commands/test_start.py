"""What `holdfast generate` has loaded by its first token: no library that only another way of running needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PROBE = """
import atexit, gc, json, sys
atexit.register(lambda: print(gc.get_freeze_count(), flush=True))  # first of all, and so run last
from holdfast.cluster.commands.entry import main
from holdfast.cluster.commands.generate import Printer

def add(printer, text, num_tokens):
    print(json.dumps(sorted(sys.modules)), flush=True)
    print(gc.get_stats()[2]["collections"], flush=True)

Printer.add = add
sys.argv[1:] = ["generate", "The capital of France is", "--max-tokens", "1"]
main()
"""

OF_A_CLUSTER = {"ray", "grpc", "google.protobuf", "holdfast.v1", "holdfast.cluster.serve", "holdfast.router.api"}
OF_HUGGING_FACE = {"transformers", "huggingface_hub", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
OF_OTHER_WAYS = {"sympy", "onnx", "pandas", "scipy", "matplotlib", "rich", "hypothesis", "pytest"}

MAX_COLLECTIONS = 2

MAX_WHOLE_COLLECTIONS = 1
"""Loading ends with one."""

FEWEST_OBJECTS = 100_000
"""Objects of torch and others that no collection at a process's end looks at; 330,000 when this was written."""

MAX_MODULES = 1750
"""1,450 when this was written and 1,700 later, 1,050 of them torch's own."""


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> list["Start"]:
    """A first start of a user's, and a later one."""
    home = tmp_path_factory.mktemp("home")
    (home / ".cache" / "holdfast").mkdir(parents=True)
    native = Path.home() / ".cache" / "holdfast" / "native"
    if native.is_dir():
        (home / ".cache" / "holdfast" / "native").symlink_to(native)
    return [a_start(home), a_start(home)]


COLLECTIONS = """
import gc

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

import holdfast
before = collections()
from holdfast import LLM, InferenceEngine
assert gc.isenabled()
print(collections() - before)
"""


class Start(NamedTuple):
    modules: set[str]
    """Modules that are loaded by the first token."""
    whole_collections: int
    """Collections of the oldest generation until then."""
    num_aside: int
    """Objects that those of the process's end do not look at."""


def a_start(home: Path) -> Start:
    environ = dict(os.environ, HOME=str(home), PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    modules, collections, num_aside = map(json.loads, done.stdout.split("\n")[:2] + done.stdout.split()[-1:])
    return Start(set(modules), collections, num_aside)


def among(loaded: set[str], names: set[str]) -> set[str]:
    """The modules of these packages."""
    return {name for name in loaded if any(f"{name}.".startswith(f"{package}.") for package in names)}


def test_no_start_in_one_process_loads_what_a_cluster_needs(starts):
    assert not among(starts[0].modules | starts[1].modules, OF_A_CLUSTER)


def test_not_even_a_first_start_of_a_stated_family_asks_hugging_face(starts):
    """The bundled model is of one."""
    assert not among(starts[0].modules | starts[1].modules, OF_HUGGING_FACE | OF_OTHER_WAYS)


def test_a_later_start_loads_few_modules(starts):
    assert len(starts[1].modules) < MAX_MODULES


def test_no_collection_looks_at_all_that_was_imported(starts):
    """Those of an import, and of a process's end, take a quarter of the CPU time of `holdfast generate`."""
    assert starts[1].whole_collections <= MAX_WHOLE_COLLECTIONS
    assert starts[1].num_aside > FEWEST_OBJECTS


def test_nothing_is_collected_while_the_public_names_are_imported():
    """But for one of what is young after each of the two: with the collector at work there are more than a hundred."""
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", COLLECTIONS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert int(done.stdout or 1000) <= MAX_COLLECTIONS, done.stderr
