"""Who may open a link: the cluster's token, certificates in both directions, and nothing that is unpickled."""

import ast
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from benchmarks.static_directory import StaticDirectory
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.v1 import engine_pb2, engine_pb2_grpc
from holdfast.worker.config import HealthConfig
from holdfast.worker.replica.link_server import REFUSED, LinkServer
from holdfast.worker.wire.link_security import LINK_NAME, TOKEN_METADATA, UNSECURED, LinkSecurity
from tests.certificates import Authority
from tests.fakes import byte_tokenizer
from tests.loops import on_a_loop
from tests.router.core import NO_LOAD
from tests.router.site import eventually
from tests.worker.replica.link_peer import INFO

ROOT = Path(__file__).parents[3]
TOKEN = "the-token-of-this-cluster-0123456789"


class Listening:
    """Stands for an engine: it notes who listens, and who has left."""

    def __init__(self) -> None:
        self.num_attached = self.num_detached = 0
        self.load = NO_LOAD
        self.progress = SimpleNamespace(count=0, expected_gap_s=0.0)
        self.has_work = False

    def attach(self, link: object) -> None:
        self.num_attached += 1

    def detach(self, link: object) -> None:
        self.num_detached += 1

    def follow_cache(self, link: object) -> None: ...


async def served(security: LinkSecurity) -> tuple[LinkServer, Listening]:
    engine = Listening()
    replica = SimpleNamespace(engine=engine, info=INFO, health=HealthConfig(), movers=None)
    return await LinkServer.start(replica, replica_id="r0", security=security), engine


async def code_of(address: str, metadata=None) -> str:
    """How a link ends that a stranger opens."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Link(metadata=metadata)
        try:
            message = await call.read()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
        call.cancel()
        return "hello" if isinstance(message, engine_pb2.LinkResponse) else str(await call.code())


@on_a_loop
async def test_a_replica_opens_a_link_for_its_own_cluster_alone():
    server, engine = await served(LinkSecurity(token=TOKEN))
    strangers = (None, ((TOKEN_METADATA, ""),), ((TOKEN_METADATA, TOKEN[:-1]),), (("authorization", TOKEN),))
    for metadata in strangers:
        assert await code_of(server.address, metadata) == f"UNAUTHENTICATED {REFUSED}"
    assert engine.num_attached == 0
    assert await code_of(server.address, LinkSecurity(token=TOKEN).metadata()) == "hello"
    assert engine.num_attached == 1
    await server.stop()


async def is_linked(server_end: LinkSecurity, router_end: LinkSecurity) -> bool:
    """Whether a router of these settings reaches such a replica; where it does not, it has been seen to try twice."""
    server, engine = await served(server_end)
    endpoint = ReplicaEndpoint(replica_id="r0", address=server.address, model=INFO.model, model_path="/nowhere")
    router = await Router.start(
        RouterConfig(max_reconnect_s=0.01),
        LimitsConfig(),
        StaticDirectory([endpoint]),
        load_tokenizer=byte_tokenizer,
        links=router_end,
    )
    (link,) = await _links(router)
    try:

        async def is_decided() -> bool:
            return link.is_up or link._backoff.num_failed > 1

        await eventually(is_decided)
        return link.is_up
    finally:
        await router.stop()
        await server.stop()

        async def is_detached() -> bool:
            return engine.num_attached == engine.num_detached

        await eventually(is_detached)  # a call that was attached as the server stopped ends a moment later


async def _links(router: Router):
    async def has_one() -> bool:
        return bool(router._link_pool._links)

    await eventually(has_one)
    return router._link_pool._links.values()


@on_a_loop
async def test_routers_and_replicas_of_one_token_find_each_other():
    assert await is_linked(LinkSecurity(token=TOKEN), LinkSecurity(token=TOKEN))
    assert not await is_linked(LinkSecurity(token=TOKEN), LinkSecurity(token=TOKEN + "x"))
    assert not await is_linked(LinkSecurity(token=TOKEN), UNSECURED)


@on_a_loop
async def test_links_over_tls_ask_both_ends_for_their_certificates(tmp_path):
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    link = LinkSecurity(token=TOKEN, tls=ours.tls(ours.pair("link", LINK_NAME)))
    forged = LinkSecurity(token=TOKEN, tls=others.tls(others.pair("forged", LINK_NAME)))
    misnamed = LinkSecurity(token=TOKEN, tls=ours.tls(ours.pair("misnamed", "some-host")))
    expired = LinkSecurity(token=TOKEN, tls=ours.tls(ours.pair("expired", LINK_NAME, is_expired=True)))
    assert await is_linked(link, link)
    for other in (forged, LinkSecurity(token=TOKEN), expired):
        assert not await is_linked(link, other)
        assert not await is_linked(other, link)
    assert not await is_linked(misnamed, link)


def test_a_token_is_not_shown():
    assert TOKEN not in repr(LinkSecurity(token=TOKEN))


# --- nothing is unpickled ---

UNPICKLES = {
    "pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib", "_pickle"
}  # fmt: skip
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
OPEN_TO_THE_NETWORK = ("router", "worker/wire", "worker/replica", "worker/executors",
    "cluster/client")  # fmt: skip
HANDS_OBJECTS = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip


def unsafe(path: Path) -> list[str]:
    """Whatever in a file could make code of bytes."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in UNPICKLES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            weights_only = any(
                keyword.arg == "weights_only" and getattr(keyword.value, "value", None) is True
                for keyword in node.keywords
            )
            if name in RUNS_TEXT or last in HANDS_OBJECTS or (name == "torch.load" and not weights_only):
                found.append(name)
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                found.append(f"{name}(allow_pickle)")
            if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
                found.append(name)
    return found


def test_nothing_that_comes_from_the_network_is_unpickled_or_run():
    files = [path for folder in OPEN_TO_THE_NETWORK for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert {str(path): found for path in files if (found := unsafe(path))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "eval(text)",
        "np.load(f, allow_pickle=True)",
        "dist.broadcast_object_list(x)",
        "yaml.load(text)",
    ],
)
def test_the_search_finds_what_it_looks_for(line, tmp_path):
    (tmp_path / "file.py").write_text(line)
    assert unsafe(tmp_path / "file.py")


def test_both_ends_of_a_link_speak_protobuf():
    """The methods that gRPC has for the link parse with the classes of `engine.proto`, and with nothing else."""
    service = engine_pb2.DESCRIPTOR.services_by_name["Engine"]
    types = {method.name: (method.input_type.name, method.output_type.name) for method in service.methods}
    assert types == {
        "Link": ("LinkRequest", "LinkResponse"),
        "SendBlocks": ("SendBlocksRequest", "SendBlocksResponse"),
        "GetPins": ("GetPinsRequest", "GetPinsResponse"),
        "EndPins": ("EndPinsRequest", "EndPinsResponse"),
    }
    source = (ROOT / "worker/wire/link_responses.py").read_text()
    assert "engine_pb2" in source
