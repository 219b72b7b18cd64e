"""Processes of our own Ray read connections on one thread, where gRPC knows how and nobody has said otherwise."""

import os
import subprocess
import sys

import pytest

from holdfast.cluster.serve.member_process import ON_ONE_THREAD, VARIABLE, read_on_one_thread


@pytest.mark.parametrize(
    ("installed", "is_set"), [("1.78.2", True), ("1.85.1", True), ("1.86.0", False), ("2.0", False)]
)
def test_only_versions_that_know_the_name_are_told_it(installed, is_set):
    environ: dict[str, str] = {}
    read_on_one_thread(environ, installed)
    assert environ == ({VARIABLE: ON_ONE_THREAD} if is_set else {})


def test_what_an_operator_has_set_stays():
    environ = {VARIABLE: "tcp_frame_size_tuning"}
    read_on_one_thread(environ, "1.80")
    assert environ == {VARIABLE: "tcp_frame_size_tuning"}


def test_the_installed_grpc_knows_the_name():
    """It complains of a name that it does not know when a channel is made."""
    environ = dict(os.environ)
    environ.pop(VARIABLE, None)
    read_on_one_thread(environ)
    words = [sys.executable, "-c", "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"]
    said = subprocess.run(words, env=environ, capture_output=True, text=True, check=True, timeout=60).stderr
    assert "Unknown experiment" not in said
