from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def crds(request: pytest.FixtureRequest) -> Path:
    """The folder of the CRDs of KubeRay and the Gateway API."""
    folder = Path(request.config.getoption("--crds"))
    if not any(folder.glob("*.yaml")):
        pytest.skip(f"needs the CRDs of KubeRay 1.7 and the Gateway API (--crds FOLDER); none are in {folder}")
    return folder
