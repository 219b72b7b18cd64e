"""What routers call their attempts, and what the engine calls them: each router counts from 1, and knows of no other.

What may live here: names. What may not: the engine, the wire, and what becomes of an attempt (`link.py` and the
simulated replica have those).
"""

from dataclasses import replace

from holdfast.worker.request import EngineRequest


class LinkSession:
    """One router's names at one replica, as long as its link lasts. `name` is unique among the replica's links.

    Nothing is kept for an attempt, since its id says which it is: there is nothing that could be forgotten, and an
    attempt that comes twice, while the first is alive, is refused by the engine as any id that is in use.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}/"

    def request_id(self, attempt: int) -> str:
        """What the engine calls it."""
        return f"{self._prefix}{attempt}"

    def attempt(self, request_id: str) -> int:
        """What the router calls a request of this link."""
        return int(request_id.removeprefix(self._prefix))

    def named(self, request: EngineRequest, attempt: int) -> EngineRequest:
        """The request as the engine is to know it: neither its id nor its group is that of another link's."""
        group_id = f"{self._prefix}{request.group_id}" if request.group_id else ""
        return replace(request, request_id=self.request_id(attempt), group_id=group_id)
