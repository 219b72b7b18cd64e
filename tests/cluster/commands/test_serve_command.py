"""What `holdfast serve` does with the signals that stop it."""

import os
import signal
import threading

import pytest

from holdfast.cluster.commands import cli
from holdfast.cluster.commands.serve import wait_for_stop
from holdfast.cluster.config.config import HoldfastConfig


def send_once_awaited(*numbers: signal.Signals) -> threading.Thread:
    """A thread that sends signals to this process as soon as it waits for them."""
    idle = signal.getsignal(signal.SIGTERM)

    def send() -> None:
        while signal.getsignal(signal.SIGTERM) is idle:
            pass
        for number in numbers:
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    return sender


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_without_an_exception(number):
    earlier = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    sender = send_once_awaited(number)
    wait_for_stop(settle_s=0.0)
    sender.join()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == earlier


def test_signals_that_come_together_are_one(monkeypatch):
    """`timeout` sends its signal to the command and then to its process group, where it arrives once more."""
    sender = send_once_awaited(signal.SIGINT, signal.SIGINT, signal.SIGTERM)
    monkeypatch.setattr("time.sleep", lambda _: sender.join())
    wait_for_stop()


def test_a_later_signal_is_a_second_one():
    sender = send_once_awaited(signal.SIGINT)
    wait_for_stop(settle_s=0.0)
    sender.join()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["demo"]),
        (["./a"], ["a"]),
        (["./a", "org/b"], ["a", "b"]),
        (["--model", "./a", "--model", "org/b"], ["a", "b"]),
        (["--model", "./a", "--served-model-name", "x"], ["x"]),
    ],
)
def test_models_are_given_one_by_one(arguments, names, monkeypatch):
    served: list[HoldfastConfig] = []
    monkeypatch.setattr("holdfast.cluster.commands.serve.run", served.append)
    assert cli.run(["serve", *arguments, "--replicas", "2"]) == 0
    (config,) = served
    assert [one.model.name for one in config.each_model] == names
    assert {one.cluster.replicas for one in config.each_model} == {2}


def test_a_model_on_the_command_line_stands_for_those_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "serve.yaml"
    path.write_text("cluster: {models: [./a, ./b]}\n")
    served: list[HoldfastConfig] = []
    monkeypatch.setattr("holdfast.cluster.commands.serve.run", served.append)
    assert cli.run(["serve", "--config", str(path)]) == 0
    assert cli.run(["serve", "./c", "--config", str(path)]) == 0
    assert [[one.model.name for one in config.each_model] for config in served] == [["a", "b"], ["c"]]


def test_two_models_of_one_name_are_the_callers_mistake(capsys):
    assert cli.run(["serve", "./a", "./elsewhere/a"]) == 2
    assert "two models are named 'a'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["list"], ["add", "demo"], ["remove", "demo"]])
def test_models_of_no_cluster_are_the_callers_mistake(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert cli.run(["models", *arguments]) == 2
    assert "0 such clusters run here (none); for a cluster on a Ray that was there before, say --address" in (
        capsys.readouterr().err
    )
