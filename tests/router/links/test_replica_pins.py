"""Pins of all replicas as operators list and end them: over gRPC, over HTTP and by the commands."""

import asyncio
from concurrent.futures import Future

import httpx

from holdfast.cluster.commands import cli
from holdfast.v1 import admin_pb2 as pb
from holdfast.v1 import admin_pb2_grpc
from holdfast.worker.request import StoredPin
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.test_keys_by_api import locked
from tests.router.links.test_real_link import BLOCK_SIZE, RealReplica
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import refusal, request, site, with_key

PROMPT = [*range(1, 4 * BLOCK_SIZE + 2)]


async def keep(place, prompt=PROMPT, metadata=None, **service):
    await place.stub.Generate(request(prompt, max_tokens=2, cache_ttl_s=300, **service), metadata=metadata)


def operator_of(place) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(place.channel)


@on_a_loop
async def test_pins_are_listed_and_ended_by_tenant():
    keys = locked(key_of("a"), key_of("b"))
    async with site(await RealReplica.start(), **keys) as place:
        for name in "ab":
            await keep(place, metadata=with_key(secret_of(name)))
        orders, key = operator_of(place), with_key(place.key)
        listed = await orders.ListPins(pb.ListPinsRequest(), metadata=key)
        assert {(one.replica_id, one.model, one.tenant, one.num_tokens) for one in listed.pins} == {
            ("r0", "pseudo", tenant, 4 * BLOCK_SIZE) for tenant in "ab"
        }
        assert all(295 < one.seconds_left <= 300 for one in listed.pins)
        assert len({one.prefix for one in listed.pins}) == 2, "a hash covers its tenant"
        denied = await refusal(orders.ListPins(pb.ListPinsRequest(), metadata=with_key(secret_of("a"))))
        assert denied.code == "PERMISSION_DENIED"
        ended = await orders.Unpin(pb.UnpinRequest(tenant="a"), metadata=key)
        assert (ended.num_blocks, list(ended.unheard)) == (4, [])
        (left,) = (await orders.ListPins(pb.ListPinsRequest(), metadata=key)).pins
        foreign = await orders.Unpin(pb.UnpinRequest(tenant="a", prefix=left.prefix), metadata=key)
        assert foreign.num_blocks == 0
        ended = await orders.Unpin(pb.UnpinRequest(tenant="b", prefix=left.prefix), metadata=key)
        assert ended.num_blocks == 4
        assert not (await orders.ListPins(pb.ListPinsRequest(), metadata=key)).pins


@on_a_loop
async def test_over_http_and_a_replica_that_does_not_answer_is_named():
    real, silent = await RealReplica.start(), await FakeReplica.start("old", "other")
    async with (
        site(real, silent, http=True) as place,
        httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as client,
    ):
        await keep(place, model="pseudo")
        listed = (await client.get("/admin/pins")).json()
        (pin,) = listed["pins"]
        assert (pin["tenant"], pin["num_tokens"], len(pin["prefix"])) == ("", 4 * BLOCK_SIZE, 32)
        assert [one["replica_id"] for one in listed["unheard"]] == ["old"]
        assert "UNIMPLEMENTED" in listed["unheard"][0]["reason"]
        for body, param in (
            ({}, "tenant"),
            ({"tenant": "", "prefix": "xyz"}, "prefix"),
            ({"tenant": "", "prefix": "00"}, "prefix"),
        ):
            refused = await client.post("/admin/unpin", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        ended = (await client.post("/admin/unpin", json={"tenant": ""})).json()
        assert (ended["num_blocks"], [one["replica_id"] for one in ended["unheard"]]) == (4, ["old"])
        assert (await client.get("/admin/pins")).json()["pins"] == []


@on_a_loop
async def test_the_commands(capsys):
    async with site(await RealReplica.start()) as place:
        server = ("--server", place.router.address)

        async def run(*words: str) -> tuple[int, str]:
            code = await asyncio.to_thread(cli.run, [*words, *server])
            return code, capsys.readouterr().out

        assert await run("pins") == (0, "no prefix is pinned\n")
        await keep(place)
        code, shown = await run("pins")
        row = shown.splitlines()[1].split()
        assert (code, row[:3], row[4:6]) == (0, ["-", "pseudo", "r0"], ["memory", str(4 * BLOCK_SIZE)])
        assert await run("unpin", "somebody") == (0, "0 blocks in memory are no longer pinned\n")
        assert await run("unpin", "", "--prefix", row[3]) == (0, "4 blocks in memory are no longer pinned\n")
        assert (await run("pins"))[1] == "no prefix is pinned\n"


class StoredPins:
    """Movers of a replica whose store keeps some prefixes."""

    asker = None
    form = "form"

    def __init__(self, *pins: StoredPin) -> None:
        self.own = self.mover = self
        self._pins = pins

    def kept_prefixes(self) -> Future[list[StoredPin]]:
        future = Future()
        future.set_result(list(self._pins))
        return future


@on_a_loop
async def test_pins_that_lie_on_a_disk_alone_are_listed_once(capsys):
    replicas = [await RealReplica.start(name) for name in ("r0", "r1")]
    async with site(*replicas) as place:
        await keep(place)
        (in_memory,) = (await operator_of(place).ListPins(pb.ListPinsRequest())).pins
        pins = (StoredPin("", 250.0, bytes.fromhex(in_memory.prefix), 4), StoredPin("a", 200.5, bytes(16), 3))
        for replica in replicas:
            replica.server._exchange._replica.movers = StoredPins(*pins)
        listed = sorted((await operator_of(place).ListPins(pb.ListPinsRequest())).pins, key=lambda one: one.tenant)
        assert [(one.tenant, one.num_tokens, one.is_on_disk) for one in listed] == [
            ("", 4 * BLOCK_SIZE, False),
            ("a", 3 * BLOCK_SIZE, True),
        ]
        assert (listed[1].replica_id, listed[1].prefix, listed[1].seconds_left) == ("r0", "00" * 16, 200.5)
        code = await asyncio.to_thread(cli.run, ["pins", "--server", place.router.address])
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        assert (code, [row[4] for row in rows]) == (0, ["memory", "disk"])
