"""What `holdfast serve` does with the signals that stop it."""

import os
import signal
import threading

import pytest

from holdfast.cluster.commands.serve import wait_for_stop


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
