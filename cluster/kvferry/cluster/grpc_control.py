"""A connection to the control front that mends itself; for engines' and clients' calls alike."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from kvferry.cluster.moving_address import MovingAddress
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import CredentialsError, DeadlineError, UnavailableError
from kvferry.proto.grpc_channel import open_channel
from kvferry.proto.v1 import control_pb2_grpc
from kvferry.worker.grpc_errors import error_of_call


@dataclass(eq=False)
class _Opened:
    """A channel, and how many calls use it; one that is retired is closed after the last of them.

    Nobody else would close it for a long time: errors keep it alive, and it reconnects by itself.
    """

    address: str
    channel: grpc.Channel
    stub: control_pb2_grpc.ControlStub
    num_calls: int = 0
    is_retired: bool = False

    def close_if_unused(self) -> None:
        if self.is_retired and not self.num_calls:
            self.channel.close()


class ControlConnection:
    """Connects at its first call. Safe to use from several threads; close it when done.

    Args:
        place: the front's address; where nobody answers any more, it is looked up again.
        credentials: what it shows to the front, and asks of it; None speaks plaintext.
    """

    def __init__(self, place: MovingAddress, credentials: Credentials | None) -> None:
        self._place = place
        self._credentials = credentials
        self._lock = threading.Lock()
        self._opened: _Opened | None = None

    @contextmanager
    def stub(self) -> Iterator[control_pb2_grpc.ControlStub]:
        """Lend the stub for one call; a failed one comes out as kvferry's error.

        Raises:
            UnavailableError: nobody answers.
            CredentialsError: one side does not take the other's certificate or token.
            ConfigError: a file of the credentials cannot be used.
            KvferryError: whatever the coordinator refused the call with.
        """
        opened = self._enter()
        try:
            yield opened.stub
        except grpc.RpcError as failed:
            error = error_of_call(failed, opened.address, self._credentials)
            # The next call reads the files of the credentials anew; others under way go on.
            if isinstance(error, UnavailableError | CredentialsError):
                self._retire(opened)
            if isinstance(error, UnavailableError | DeadlineError):
                self._place.look_again()
            raise error from None
        finally:
            self._leave(opened)

    def close(self) -> None:
        """Close the channel. Calls under way end with UnavailableError."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.channel.close()

    def _enter(self) -> _Opened:
        """Return the channel to where the front is now; threads that need a new one open one."""
        address = str(self._place)
        with self._lock:
            if self._opened is not None and self._opened.address != address:
                self._drop(self._opened)
            if self._opened is None:
                channel = open_channel(address, self._credentials)
                self._opened = _Opened(address, channel, control_pb2_grpc.ControlStub(channel))
            self._opened.num_calls += 1
            return self._opened

    def _leave(self, opened: _Opened) -> None:
        with self._lock:
            opened.num_calls -= 1
            opened.close_if_unused()

    def _retire(self, opened: _Opened) -> None:
        with self._lock:
            if self._opened is opened:
                self._drop(opened)

    def _drop(self, opened: _Opened) -> None:
        self._opened = None
        opened.is_retired = True
        opened.close_if_unused()
