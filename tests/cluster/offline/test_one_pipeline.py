import subprocess
import sys

import pytest

import holdfast


def test_every_public_name_can_be_imported():
    public = {name: getattr(holdfast, name) for name in holdfast.__all__}
    constants = {name for name, value in public.items() if isinstance(value, str)}
    assert constants == {"SERVICE_CONFIG", "__version__"}
    in_vllm = {"GuidedDecodingParams", "StructuredOutputsParams"}
    assert {public[name] for name in in_vllm} == {public["StructuredOutputs"]}
    ours = {name: value for name, value in public.items() if name not in constants | in_vllm}
    assert {value.__name__ for value in ours.values()} == set(ours)
    assert set(dir(holdfast)) == set(holdfast.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = holdfast.nonsense


def test_importing_the_package_loads_nothing_heavy():
    script = "import holdfast, sys; print({'torch', 'ray', 'transformers', 'grpc', 'pydantic'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
