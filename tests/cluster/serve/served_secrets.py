"""A server with secrets that a test looks for in all that it has written. Run as a program; its arguments are a folder
with certificates and keys, and the secrets, which it must say nowhere.
"""

import asyncio
import faulthandler
import logging
import sys
from pathlib import Path

import grpc
import httpx
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.serve.log_files import date_log_lines
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.config import LimitsConfig, RouterConfig, SecurityConfig
from holdfast.router.server.router import Router
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from holdfast.worker.wire.tls import Tls
from tests.fakes import FakeReplica, byte_tokenizer
from tests.router.site import eventually, request, with_key


async def serve(folder: Path, key: str, wrong_key: str, token: str, prompt: str) -> str:
    """What the server publishes, after good, bad and failing requests."""
    settings = SecurityConfig(api_keys=folder / "keys.json", tls_cert=folder / "good.crt", tls_key=folder / "good.key")
    security = ClusterSecurity(token=token, settings=settings)
    logging.info("%s %r %r", security, security.links, security.gate)
    replica = await FakeReplica.start()
    router = await Router.start(
        RouterConfig(),
        LimitsConfig(),
        StaticDirectory([replica.endpoint]),
        load_tokenizer=byte_tokenizer,
        http_port=0,
        admin_port=0,
        gate=security.gate,
        tls=security.server_tls,
        links=security.links,
    )

    async def is_up() -> bool:
        return any(model.num_replicas for model in router._dispatch_host.dispatch.models())

    await eventually(is_up)
    tls, published = Tls(ca=folder / "authority.pem"), []
    async with grpc.aio.secure_channel(router.address, tls.channel_credentials()) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for presented in (key, wrong_key, ""):
            for asked in (request(prompt), request(prompt, model=prompt), request(prompt, request_id=f"\n{prompt}")):
                try:
                    await stub.Generate(asked, metadata=with_key(presented))
                except grpc.aio.AioRpcError as error:
                    published.append(str(error).replace(repr(prompt)[1:-1], ""))  # its sender may be told its own words
        router._request_processor.open = None  # an internal error, with the prompt in its stack
        fault = stub.Generate(request(prompt), metadata=with_key(key))
        try:
            await fault
        except grpc.aio.AioRpcError as error:
            published.append(str(error))
        published.append(str(await stub.GetLoad(inference_pb2.GetLoadRequest(), metadata=with_key(key))))
    async with httpx.AsyncClient(verify=tls.client_context(), base_url=f"https://{router.http_address}") as client:
        for presented in (key, wrong_key):
            headers = {"x-api-key": presented}
            for body in ({"prompt": prompt}, {"prompt": prompt, prompt: 1}, {"prompt": [prompt]}):
                await client.post("/v1/completions", json=body, headers=headers)
            for path in ("/metrics", "/load", "/v1/models", "/openapi.json", "/version", "/health"):
                published.append((await client.get(path, headers=headers)).text)
    async with grpc.aio.insecure_channel(router.admin_address) as channel:
        admin = channelz_pb2_grpc.ChannelzStub(channel)
        for ask, message in (
            (admin.GetServers, channelz_pb2.GetServersRequest()),
            (admin.GetTopChannels, channelz_pb2.GetTopChannelsRequest()),
        ):
            published.append(str(await ask(message, metadata=with_key(key))))
    await router.stop()
    await replica.kill()
    return "\n".join(published)


def main() -> None:
    date_log_lines()
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.DEBUG)
    for name in ("httpx", "httpcore", "hpack"):  # the client's own logs are not the server's
        logging.getLogger(name).setLevel(logging.ERROR)
    folder, *secrets = sys.argv[1:]
    print(asyncio.run(serve(Path(folder), *secrets)))
    try:
        raise ValueError(secrets[-1])
    except ValueError:
        logging.exception("a fault with a prompt in it")
    faulthandler.dump_traceback(all_threads=True)


if __name__ == "__main__":
    main()
