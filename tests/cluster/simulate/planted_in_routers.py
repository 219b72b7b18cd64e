"""Bugs that tests plant in the deciders of routers and clients, to see whether the simulator finds them."""

import math
from collections.abc import Hashable
from typing import Any

import pytest

from holdfast.cluster.simulate.actors.client import SimulatedClient
from holdfast.router.dispatch import failures
from holdfast.router.dispatch import request_stream as request_stream_module
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_stream import RequestStream
from holdfast.router.dispatch.request_table import RequestTable
from holdfast.router.events import Action
from holdfast.router.resume import ResumeRecord, SequenceDelta
from holdfast.router.text.text_stream import TextStream


def drop_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replica says of an attempt that has ended is taken for news of the request's next attempt."""
    begin, ended = RequestTable.begin_attempt, dict[tuple[int, Hashable], RequestState]()

    def begin_attempt(self: RequestTable, record: RequestState, *args: Any) -> object:
        attempt = begin(self, record, *args)
        ended[id(self), attempt.number] = record
        return attempt

    def running(self: RequestTable, replica: ReplicaState, attempt: Hashable) -> RequestState | None:
        record = ended.get((id(self), attempt))
        is_open = record is not None and self.get(record.request_id) is record and record.attempt is not None
        return record if is_open else None

    monkeypatch.setattr(RequestTable, "begin_attempt", begin_attempt)
    monkeypatch.setattr(RequestTable, "running", running)


def forget_the_stop_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On failover the text state starts anew after the tokens so far, without what it had held back."""
    continuation = RequestState.continuation

    def forgetful(self: RequestState, *args: Any) -> object:
        if self.output_token_ids:
            assert isinstance(self.text, TextStream)
            if self.text._matcher is not None:
                self.text._matcher._held = ""
        return continuation(self, *args)

    monkeypatch.setattr(RequestState, "continuation", forgetful)


def forget_that_a_completion_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that resumes does not say which of its completions have ended."""

    def forgetful(self: SimulatedClient) -> ResumeRecord | None:
        record = resume(self)
        for sequence in () if record is None else record.sequences:
            sequence.finish_reason = None
        return record

    resume = SimulatedClient._resume
    monkeypatch.setattr(SimulatedClient, "_resume", forgetful)


def count_one_character_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's record counts one character less of each piece."""

    def shorter(self: ResumeRecord, delta: SequenceDelta) -> bool:
        is_end = delta.finish_reason is not None
        return merge(self, delta if is_end else delta._replace(text_length=max(0, delta.text_length - 1)))

    merge = ResumeRecord.merge
    monkeypatch.setattr(ResumeRecord, "merge", shorter)


def let_a_straggler_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two submissions of a request, the one that comes later goes on, also if its client sent it first."""
    supersede = Dispatch.supersede
    monkeypatch.setattr(
        Dispatch, "supersede", lambda self, request_id, attempt, now: supersede(self, request_id, 10**6, now)
    )


def forget_what_a_sibling_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usage of a request with several completions is that of the one which ended last."""
    monkeypatch.setattr(request_stream_module, "together", lambda usages, share_prompt: usages[-1])


def leave_siblings_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a request's last completion finds no room, those that were opened before it go on for nobody."""

    open_all = RequestStream.open

    def forgetful(self: RequestStream, *args: Any, **named: Any) -> None:
        close, self.close = self.close, lambda: None
        open_all(self, *args, **named)
        self.close = close

    monkeypatch.setattr(RequestStream, "open", forgetful)


def leave_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer that rings too early to find anything due is not set again."""

    def tick(self: DispatchHost) -> None:
        self._timer, self._timer_due = None, math.inf
        actions = self.dispatch.tick(self.now())
        if actions:
            self.perform(actions)

    monkeypatch.setattr(DispatchHost, "_tick", tick)


def keep_the_later_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that is due before those that are open is not waited for."""
    set_timer = DispatchHost._set_timer

    def set_once(self: DispatchHost) -> None:
        if self._timer is None:
            set_timer(self)

    monkeypatch.setattr(DispatchHost, "_set_timer", set_once)


def break_under_a_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What meets an alarm that is as good as due fails, and is dealt with as a fault of the router."""
    set_timer = DispatchHost._set_timer

    def fail_if_near(self: DispatchHost) -> None:
        due = self.dispatch.next_tick
        if due is not None and 0 < due - self.now() < 0.0005:
            raise RuntimeError("a handle without a time")
        set_timer(self)

    monkeypatch.setattr(DispatchHost, "_set_timer", fail_if_near)


def lose_what_a_slow_reader_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what came since a reader last looked, it gets the newest."""
    monkeypatch.setattr(request_stream_module, "merged", lambda deltas: deltas[-1])


def go_on_at_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with output that has lost its replica goes on wherever there is room."""
    monkeypatch.setattr(RequestState, "version", "")


def refuse_who_waits_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model has no replica, its requests are refused as if all replicas were busy."""

    def fail_late(self: Dispatch, now: float) -> list[Action]:
        late = iter(lambda: self._queue.pop_late(now), None)
        return [action for state in late for action in self._endings.fail(state, self._queue.too_late(state))]

    monkeypatch.setattr(Dispatch, "_fail_late", fail_late)


def convict_whom_a_host_took_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas that are lost with their host count as two crashes of a request that was on both."""
    monkeypatch.setattr(failures, "HOST_LOSS_S", 0.0)
