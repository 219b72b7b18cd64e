"""Failover against any order of crashes, drains, refusals and lost links: every stream comes to its right end.

The replicas and clients are those of `test_dispatch_properties.py`, but here nothing may fail: deadlines are far, no
request is taken for a poison, and in the end the replicas stay up.
"""

from collections import deque

from hypothesis import settings

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.worker.request import SequenceKey
from tests.examples import examples
from tests.router.dispatch.test_dispatch_properties import REPLICAS, DispatchMachine, Replica

FAR = 10**6


class FailoverMachine(DispatchMachine):
    config = RouterConfig(
        max_waiting_per_replica=2,
        replica_wait_s=FAR,
        max_replicas_lost=FAR,
        retry_burst=2,
        retries_per_s=1,
        retry_share=0.5,
    )
    limits = LimitsConfig(max_queued=FAR)
    least_timeout_s = FAR

    def replica_refuses(self, replica: Replica, gives_up: bool) -> None:
        """Replicas are full now and then. Those that give up what they have accepted may end a request."""
        super().replica_refuses(replica, gives_up=False)

    def teardown(self):
        if not hasattr(self, "dispatch"):
            return
        for replica_id in REPLICAS:
            if replica_id in self.replicas:
                self.perform(self.dispatch.replica_retiring(replica_id, False, self.now))
            else:
                self.replica_comes(replica_id)
        for request_id in self.open_clients():
            self.perform(self.dispatch.go_on(SequenceKey("", request_id), self.now))
        for _ in range(500):
            if not self.dispatch.num_open:
                break
            self.now += 40
            self.perform(self.dispatch.tick(self.now))
            self.replicas_work_and_are_heard()
        for client in self.clients.values():
            assert client.is_cancelled or client.finish_reason is not None, "a stream was lost"
        super().teardown()

    def replicas_work_and_are_heard(self) -> None:
        for replica_id, replica in self.replicas.items():
            replica.step(num_tokens=1, num_repeated=1)
            news, replica.on_the_way = replica.on_the_way, deque()
            for update in news:
                self.perform(self.dispatch.step(replica_id, update, self.now))


TestFailover = FailoverMachine.TestCase
TestFailover.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)
