"""What is installed: one top-level name, typed, that no file of a user's can shadow."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "tests", "docs")
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
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=LEFT_OUT)
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=folder / "source", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_one_top_level_name_and_its_data(installed):
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"holdfast"}
    package = installed / "holdfast"
    for name in ("py.typed", "v1/inference.proto", "v1/inference_pb2.pyi", "cluster/bundled_model/model/config.json"):
        assert (package / name).exists(), name


@pytest.mark.parametrize("ending", ["py", "h", "cpp"])
def test_every_source_file_is_in_the_wheel(installed, ending):
    paths = [path for name in ("worker", "router", "cluster") for path in (ROOT / name).rglob(f"*.{ending}")]
    sources = {path.relative_to(ROOT) for path in paths}
    shipped = {path.relative_to(installed / "holdfast") for path in (installed / "holdfast").rglob(f"*.{ending}")}
    assert sources
    assert sources <= shipped, sources - shipped


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
