"""What is installed: one top-level name, typed, that no file of a user's can shadow."""

import asyncio
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from holdfast.worker.executors.cpu import build, library
from tests import loops
from tests.chaos.forked import forked_cluster

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
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    keep_libraries(folder / "source/worker/executors/cpu/libraries")
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=folder / "source", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel):
    """A folder into which the wheel was unpacked."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


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


def required(installed, extra=""):
    """Names of the packages that an installation with an extra asks for."""
    (folder,) = installed.glob("*.dist-info")
    wanted = map(Requirement, Distribution.at(folder).requires or ())
    return {one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})}


def test_an_audit_needs_none_of_the_packages_that_serve(installed):
    assert required(installed) == {"cyclopts", "rich"}
    assert required(installed, "verify") == {"cyclopts", "rich", "httpx", "jsonschema"}
    assert {"torch", "ray", "transformers", "pydantic"} < required(installed, "serve")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_environment_of_the_audit_alone_audits_a_server(wheel, tmp_path):
    """Installed from a registry. `holdfast serve` there names the extra that it lacks."""
    venv.create(tmp_path / "venv", with_pip=True)
    program = tmp_path / "venv/bin/holdfast"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [program.with_name("python"), "-m", "pip", "install", "--quiet", f"{wheel}[verify]"]
    subprocess.run(pip, check=True, env=environ)
    site = next((tmp_path / "venv/lib").glob("python*")) / "site-packages"
    assert not {"torch", "ray", "transformers", "grpc", "numpy"} & {path.name for path in site.iterdir()}

    def run(*words):
        return subprocess.run([program, *words], env=environ, cwd=tmp_path, capture_output=True, text=True)

    async def audited():
        async with forked_cluster(tmp_path, step_s=0.0) as cluster:
            url = f"http://{cluster.routers[0].http_address}"
            return await asyncio.to_thread(run, "verify", url, "--prompts", "2", "--tokens", "8", "--pause", "0")

    ran = loops.run(audited(), timeout_s=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 faults, 0 differences" in ran.stdout
    refused = run("serve")
    assert (refused.returncode, "pip install 'holdfast[serve]'" in refused.stderr) == (2, True)
