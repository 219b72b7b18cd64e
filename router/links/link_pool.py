"""Link pool: one link for each replica of the replica directory."""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.links.replica_directory import DirectoryView, ReplicaDirectory, ReplicaEndpoint
from holdfast.router.links.replica_link import ReplicaLink
from holdfast.router.operator_state import NO_OPERATOR_STATE, OperatorState
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.worker.adapter import Adapter
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.wire.link_security import UNSECURED, LinkSecurity

logger = logging.getLogger(__name__)

WATCH_AGAIN_S: Final = 1.0


class LinkPool:
    """All links of one router."""

    def __init__(
        self,
        dispatch_host: DispatchHost,
        tokenizers: TokenizerRegistry,
        config: RouterConfig,
        security: LinkSecurity = UNSECURED,
        on_operator_state: Callable[[OperatorState], None] | None = None,
        on_view: Callable[[DirectoryView], None] | None = None,
        pinned: Callable[[str], tuple[Adapter, ...]] = lambda _: (),
    ) -> None:
        """`on_operator_state` gets the operator state when it changes; `on_view` gets each view of the directory;
        `pinned` returns the adapters of a model that stay resident.
        """
        self._pinned = pinned
        self._on_operator_state = on_operator_state
        self._on_view = on_view
        self._operator_state = NO_OPERATOR_STATE
        self._endpoints: frozenset[ReplicaEndpoint] = frozenset()
        self._security = security
        self._dispatch_host = dispatch_host
        self._tokenizers = tokenizers
        self._config = config
        self._links: dict[str, ReplicaLink] = {}
        self._wanted: frozenset[ReplicaEndpoint] = frozenset()
        self._updating = asyncio.Lock()
        """Links are hung up and dialled by one update at a time: hanging up waits for the link's end."""
        self._is_stopped = False

    async def follow(self, directory: ReplicaDirectory) -> None:
        """Follows the directory until cancelled. If it fails, it is watched again after a pause, and the links stay."""
        while True:
            try:
                async for view in directory.watch():
                    self._dispatch_host.models_removed(view.removed_models)
                    self._dispatch_host.models_asleep(dict(view.cold_starts))
                    self._endpoints = view.endpoints
                    if self._on_view is not None:
                        self._on_view(view)
                    await self.apply(
                        max(
                            self._operator_state,
                            view.operator_state,
                            key=lambda operator_state: operator_state.revision,
                        )
                    )
            except Exception:  # any directory may fail, Ray's too: a router with a stale view is better than none
                logger.exception("the replica directory failed; the links stay as they are until it answers again")
            await asyncio.sleep(WATCH_AGAIN_S)

    async def update(self, endpoints: frozenset[ReplicaEndpoint]) -> None:
        """Dials new replicas, retires the links of missing ones. Of several updates at a time the last one holds."""
        self._wanted = endpoints
        async with self._updating:
            if not self._is_stopped:
                await self._follow(self._wanted)

    async def _follow(self, endpoints: frozenset[ReplicaEndpoint]) -> None:
        wanted = {endpoint.replica_id: endpoint for endpoint in endpoints}
        self._links = {replica_id: link for replica_id, link in self._links.items() if not link.has_ended}
        for replica_id, link in list(self._links.items()):
            endpoint = wanted.get(replica_id)
            if endpoint == link.endpoint or (endpoint is None and link.is_up):
                link.retire(endpoint is None)
            else:
                await self._hang_up(link)
        for replica_id in wanted.keys() - self._links.keys():
            endpoint = wanted[replica_id]
            pinned = partial(self._pinned, endpoint.model)
            link = ReplicaLink(endpoint, self._dispatch_host, self._prepare, self._config, self._security, pinned)
            self._links[replica_id] = link
            link.start()
        for link in self._links.values():
            link.set_log_level(self._operator_state.log_level)
            link.keep_adapters()

    async def stop(self) -> None:
        """Closes all links, for good."""
        self._is_stopped = True
        async with self._updating:
            await asyncio.gather(*(link.stop() for link in self._links.values()))
            self._links.clear()

    def kill(self, replica_id: str) -> None:
        """The replica's process is to end at once. The replica must be up."""
        self._links[replica_id].kill()

    async def apply(self, operator_state: OperatorState) -> None:
        """Applies operators' settings: drained replicas retire, as if the directory did not name them."""
        if operator_state != self._operator_state and self._on_operator_state is not None:
            self._on_operator_state(operator_state)
        self._operator_state = operator_state
        await self.update(frozenset(one for one in self._endpoints if one.replica_id not in operator_state.drained))

    def links(self) -> Collection[ReplicaLink]:
        """Links of all replicas."""
        return self._links.values()

    # --- inside ---

    async def _prepare(self, endpoint: ReplicaEndpoint, facts: ReplicaFacts) -> None:
        """Loads the model's tokenizer. A replica is up only then, so that every known model can be used."""
        await self._tokenizers.load(endpoint.model, endpoint.model_path, facts.chat_template)

    async def _hang_up(self, link: ReplicaLink) -> None:
        """Closes a link that is not up, or whose replica has a new address."""
        del self._links[link.endpoint.replica_id]
        await link.stop()
