"""Requests of one session reach one replica, by whichever field and API the session is said."""

import httpx2

from holdfast.router.config import RouterConfig
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.site import request, site

NUM_REPLICAS, NUM_ASKED = 4, 5


@on_a_loop
async def test_a_session_stays_with_a_replica_and_sessions_are_spread():
    replicas = [await FakeReplica.start(f"r{number}") for number in range(NUM_REPLICAS)]
    async with site(*replicas, config=RouterConfig(routing_policy="session_affinity"), http=True) as place:
        base_url = f"http://{place.router.http_address}"
        async with httpx2.AsyncClient(base_url=base_url) as client:

            async def over_http(**session) -> None:
                body = {"prompt": "hello", "max_tokens": 1, **session}
                assert (await client.post("/v1/completions", json=body)).status_code == 200

            async def over_grpc(session_id: str) -> None:
                await place.stub.Generate(request("hello", max_tokens=1, session_id=session_id))

            async def homes(ask, *sessions) -> set[str]:
                before = {replica.replica_id: replica.num_tokens for replica in replicas}
                for session in sessions:
                    await ask(session)
                return {one.replica_id for one in replicas if one.num_tokens > before[one.replica_id]}

            every = [
                await homes(over_grpc, *["a"] * NUM_ASKED),
                await homes(lambda name: over_http(session_id=name), *["a"] * NUM_ASKED),
                await homes(lambda name: over_http(prompt_cache_key=name), *["a"] * NUM_ASKED),
            ]
            assert every[0] == every[1] == every[2]
            assert len(every[0]) == 1
            assert len(await homes(over_grpc, *map(str, range(30)))) == NUM_REPLICAS
