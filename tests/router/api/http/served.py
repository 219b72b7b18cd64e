"""A served router on a thread of its own, for tests whose clients block."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.router.config import LimitsConfig, RouterConfig
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import runner
from tests.router.api.http.test_openai_sdk import TEMPLATE
from tests.router.site import Site, site


class Served:
    """Where it is, and a way onto its event loop."""

    def __init__(self, place: Site, loop: asyncio.AbstractEventLoop) -> None:
        self.place = place
        self.address = place.router.http_address
        self._loop = loop

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(30)


@contextmanager
def served(max_model_len: int = 200, limits: LimitsConfig | None = None, *, stores: bool = False) -> Iterator[Served]:
    """Leaving it checks that nothing is left over, as every site does. `stores`: it has a store of its own."""
    ready, over = threading.Event(), threading.Event()
    found: list[Served] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        replica = await FakeReplica.start(step_s=0.0)
        replica.max_model_len = max_model_len
        load = lambda path: byte_tokenizer(path, TEMPLATE)  # noqa: E731
        with TemporaryDirectory() as folder:
            config = RouterConfig(max_reconnect_s=0.1, store=folder if stores else None)
            async with site(replica, config=config, load_tokenizer=load, limits=limits, http=True) as place:
                found.append(Served(place, asyncio.get_running_loop()))
                ready.set()
                await asyncio.to_thread(over.wait)

    def work() -> None:
        try:
            with runner() as loops:
                loops.run(serve())
        except BaseException as failure:
            failures.append(failure)
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="served router")
    thread.start()
    ready.wait(20)
    try:
        assert found, failures
        yield found[0]
    finally:
        over.set()
        thread.join(30)
    assert not failures, failures
    assert not thread.is_alive()
