"""A connection to the control front that mends itself; for engines' and clients' calls alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kvferry.cluster.moving_address import MovingAddress
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import CredentialsError, DeadlineError, UnavailableError
from kvferry.proto.grpc_channel import open_channel
from kvferry.proto.v1 import control_pb2_grpc
from kvferry.worker.grpc_errors import error_of_call


class ControlConnection:
    """Connects at its first call. Safe to use from several threads; close it when done.

    Args:
        place: the front's address; where nobody answers any more, it is looked up again.
        credentials: what it shows to the front, and asks of it; None speaks plaintext.
    """

    def __init__(self, place: MovingAddress, credentials: Credentials | None) -> None:
        self._place = place
        self._credentials = credentials
        self._opened: tuple[str, grpc.Channel, control_pb2_grpc.ControlStub] | None = None

    @contextmanager
    def stub(self) -> Iterator[control_pb2_grpc.ControlStub]:
        """Lend the stub for one call; a failed one comes out as kvferry's error.

        Raises:
            UnavailableError: nobody answers.
            CredentialsError: one side does not take the other's certificate or token.
            ConfigError: a file of the credentials cannot be used.
            KvferryError: whatever the coordinator refused the call with.
        """
        opened, address = self._opened, str(self._place)
        if opened is None or opened[0] != address:
            channel = open_channel(address, self._credentials)
            opened = self._opened = address, channel, control_pb2_grpc.ControlStub(channel)
        try:
            yield opened[2]
        except grpc.RpcError as failed:
            error = error_of_call(failed, address, self._credentials)
            # The next call reads the files of the credentials anew; others under way go on.
            if isinstance(error, UnavailableError | CredentialsError) and self._opened is opened:
                self._opened = None
            if isinstance(error, UnavailableError | DeadlineError):
                self._place.look_again()
            raise error from None

    def close(self) -> None:
        """Close the channel. Calls under way end with UnavailableError."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()
