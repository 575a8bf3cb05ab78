"""One gRPC channel per peer, kept; and what fails in it as kvferry's errors."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import CredentialsError, UnavailableError
from kvferry.proto.grpc_channel import open_channel
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.own_process import OwnProcess


class Channels:
    """Thread-safe. Make it after a fork, never before: gRPC does not survive one."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._own_process = OwnProcess()
        self._credentials = credentials
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    @contextmanager
    def lend(self, address: str) -> Iterator[grpc.Channel]:
        """Lend the peer's channel; failed calls come out as kvferry's errors.

        Raises:
            BadInputError: this process was forked off since the channels were made.
            KvferryError: what the body's calls failed with.
        """
        self._own_process.require()
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = open_channel(address, self._credentials)
                self._channels[address] = channel
        try:
            yield channel
        except grpc.RpcError as failed:
            error = error_of_call(failed, address, self._credentials)
            # A fresh channel reads the files of the credentials anew.
            if isinstance(error, UnavailableError | CredentialsError):
                self._forget(address, channel)
            raise error from failed

    def close(self) -> None:
        """Close all channels; calls under way end with UnavailableError."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def _forget(self, address: str, channel: grpc.Channel) -> None:
        """Open a fresh channel for the next call; other calls under way keep the old one."""
        with self._lock:
            if self._channels.get(address) is channel:
                del self._channels[address]
