"""Channelz (grpc.channelz.v1): gRPC's own data on this process's servers, connections and channels.

For an admin port only, because it shows every peer. grpcio-channelz' own servicer fails on fields of gRPC's core that
its definitions lack; these answers leave them out. Uses of gRPC's internals are here alone, as they were read in gRPC
1.85.
"""

from collections.abc import Callable
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message
from grpc._cython import cygrpc
from grpc_channelz.v1 import channelz_pb2 as pb

from holdfast.router.api.grpc.handlers import Context
from holdfast.worker.errors import InvalidRequestError

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Channelz"]


class ChannelzServicer:
    """Method by method. An id that is not known is refused by name."""

    async def GetTopChannels(self, message: Any, context: Context) -> Message:
        return _answer(pb.GetTopChannelsResponse, cygrpc.channelz_get_top_channels, message.start_channel_id)

    async def GetServers(self, message: Any, context: Context) -> Message:
        return _answer(pb.GetServersResponse, cygrpc.channelz_get_servers, message.start_server_id)

    async def GetServer(self, message: Any, context: Context) -> Message:
        return _answer(pb.GetServerResponse, cygrpc.channelz_get_server, message.server_id)

    async def GetServerSockets(self, message: Any, context: Context) -> Message:
        ids = message.server_id, message.start_socket_id, message.max_results
        return _answer(pb.GetServerSocketsResponse, cygrpc.channelz_get_server_sockets, *ids)

    async def GetChannel(self, message: Any, context: Context) -> Message:
        return _answer(pb.GetChannelResponse, cygrpc.channelz_get_channel, message.channel_id)

    async def GetSubchannel(self, message: Any, context: Context) -> Message:
        return _answer(pb.GetSubchannelResponse, cygrpc.channelz_get_subchannel, message.subchannel_id)

    async def GetSocket(self, message: Any, context: Context) -> Message:
        return _answer(pb.GetSocketResponse, cygrpc.channelz_get_socket, message.socket_id)


def _answer(kind: type[Message], ask: Callable[..., bytes], *ids: int) -> Message:
    try:
        text = ask(*ids)
    except ValueError:
        raise InvalidRequestError("id", ids[0], "is not known here") from None
    return json_format.Parse(text, kind(), ignore_unknown_fields=True)
