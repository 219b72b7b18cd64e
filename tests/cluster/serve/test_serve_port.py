"""Serve's own port is on the node's address alone, and no import of Ray comes before a cluster's settings."""

import subprocess
import sys

import pytest

from holdfast.cluster.serve.ray_internals import on_host


@pytest.mark.parametrize(
    ("address", "host", "narrow"),
    [
        ("[::]:0", "127.0.0.1", "127.0.0.1:0"),
        ("[::]:50", "fd00::2", "[fd00::2]:50"),
        ("10.0.0.1:0", "127.0.0.1", "10.0.0.1:0"),
    ],
)
def test_every_interface_becomes_the_node(address, host, narrow):
    assert on_host(address, host) == narrow


def test_serve_still_adds_its_port_by_the_name_that_is_replaced():
    from ray.serve._private import replica

    assert callable(replica.add_port_to_grpc_server)


WAYS = """
import sys
from holdfast.cluster.config.config import ClusterConfig
from holdfast.cluster.commands import serve, hosted
from holdfast.cluster.serve import local, models, preflight, serving
models.default_host(ClusterConfig())
assert "ray" not in sys.modules, "Ray takes its settings when it is imported"
import ray
local._close_our_own()
print(ray.util.get_node_ip_address())
"""


def test_what_serve_does_before_it_starts_ray_does_not_import_it_and_an_import_before_changes_nothing():
    assert subprocess.check_output([sys.executable, "-c", WAYS], text=True, timeout=120).split() == ["127.0.0.1"]
