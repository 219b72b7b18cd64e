import subprocess
import sys

import pytest

import holdfast


def test_every_public_name_can_be_imported():
    assert {getattr(holdfast, name).__name__ for name in holdfast.__all__} == set(holdfast.__all__)
    assert set(dir(holdfast)) == set(holdfast.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = holdfast.nonsense


def test_importing_the_package_loads_nothing_heavy():
    script = "import holdfast, sys; print({'torch', 'ray', 'transformers', 'grpc', 'pydantic'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
