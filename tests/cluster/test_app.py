import logging

import pytest
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

import holdfast
from cluster import app
from cluster.app import build_app
from worker.errors import ConfigurationError

ARGS = {"parallel": {"tensor_parallel_size": 2}, "cluster": {"replicas": 2}}


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "node_resources", lambda: [{"CPU": 4.0}])


@pytest.mark.usefixtures("four_cpus")
def test_serve_can_build_the_application_from_the_args_of_its_own_config_file():
    built = call_user_app_builder_with_args_if_necessary(holdfast.build_app, ARGS)
    assert isinstance(built, serve.Application)


@pytest.mark.usefixtures("four_cpus")
def test_wrong_args_are_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"cluster.replica \(from build_app\); did you mean cluster.replicas"):
        build_app({"cluster": {"replica": 2}})


@pytest.mark.usefixtures("four_cpus")
def test_ranks_that_must_part_are_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        build_app(ARGS)
        assert caplog.text == ""
        build_app({"parallel": {"tensor_parallel_size": 8}})
    assert "do not fit on whole nodes" in caplog.text
