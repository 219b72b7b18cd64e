"""What is installed: one top-level name, typed, that no file of a user's can shadow."""

import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.worker.executors.cpu import build, library

ROOT = Path(__file__).parent.parent
LEFT_OUT = (".*", "*.egg-info", "build", "dist", "__pycache__", "tests", "docs")
WITHOUT_COMPILER = """
import os, runpy, sys, sysconfig
os.environ["PATH"] = "/nowhere"
sysconfig.get_paths = lambda *_, paths=sysconfig.get_paths(): {**paths, "purelib": "/nowhere"}
sys.argv[0] = "setup.py"
runpy.run_path("setup.py")
"""
BUILD = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
COMMON_NAMES = ("worker", "router", "cluster", "proto", "scripts", "benchmarks")
USE = """
import holdfast
from holdfast import AsyncClient, Client, SamplingParams, build_app
from holdfast.cluster.commands import cli
assert holdfast.__file__.startswith(sys.argv[1]), holdfast.__file__
print(SamplingParams(), AsyncClient, Client)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the wheel was unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    keep_libraries(folder / "source/worker/executors/cpu/libraries")
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=folder / "source", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def keep_libraries(folder: Path) -> None:
    """As `make install` leaves them beside the sources: a build would compile for a minute what is in the cache."""
    folder.mkdir(exist_ok=True)
    with suppress(library.Unavailable):
        for name in build.CLASSES:
            shutil.copy(library.path_of(name), folder / f"{name}.so")


def test_the_wheel_has_one_top_level_name_and_its_data(installed):
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"holdfast"}
    package = installed / "holdfast"
    protos = ("v1/inference.proto", "v1/inference_pb2.pyi", "foreign/grpc_service.proto", "foreign/health_pb2.pyi")
    for name in ("py.typed", *protos, "cluster/bundled_model/model/config.json", "cluster/config/flags.json"):
        assert (package / name).exists(), name


@pytest.mark.parametrize("ending", ["py", "h", "cpp"])
def test_every_source_file_is_in_the_wheel(installed, ending):
    paths = [path for name in ("worker", "router", "cluster") for path in (ROOT / name).rglob(f"*.{ending}")]
    sources = {path.relative_to(ROOT) for path in paths}
    shipped = {path.relative_to(installed / "holdfast") for path in (installed / "holdfast").rglob(f"*.{ending}")}
    assert sources
    assert sources <= shipped, sources - shipped


def test_the_wheel_has_the_native_executor_and_its_sources(installed):
    folder = installed / "holdfast/worker/executors/cpu"
    sources = {path.name for path in build.SOURCES.iterdir()}
    assert {path.name for path in (folder / "native").iterdir()} == sources
    libraries = list((folder / "libraries").glob("*.so"))
    if not libraries and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    assert {path.stem for path in libraries} == set(build.CLASSES)
    assert all(build.is_current(path) for path in libraries)


def test_without_a_compiler_the_build_goes_on_and_says_so(tmp_path):
    shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT, "libraries"))
    words = [sys.executable, "-c", WITHOUT_COMPILER, "-q", "build_native", "--build-lib", str(tmp_path / "built")]
    ran = subprocess.run(words, cwd=tmp_path / "source", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if "native" in line]
    assert line.startswith("the native executor is left out: no C++ compiler was found")


def test_a_script_may_have_files_with_common_names_beside_it(installed, tmp_path):
    for name in COMMON_NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')")
    script = tmp_path / "script.py"
    script.write_text(f"import sys{USE}")
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    ran = subprocess.run([sys.executable, script, installed], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    command = [
        sys.executable,
        "-c",
        "import sys; from holdfast.cluster.commands.cli import main; main()",
        "config",
        "show",
    ]
    shown = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "cluster.replicas" in shown.stdout
