"""gRPC does not survive a fork: a channel is for the process that opened it."""

import os

from kvferry.proto.errors import BadInputError


class OwnProcess:
    """Remembers the process it was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def require(self) -> None:
        """Refuse any other process, such as a child forked off since.

        Raises:
            BadInputError: another process; naming both.
        """
        pid = os.getpid()
        if pid != self._pid:
            raise BadInputError(
                "a connection does not survive a fork; connect in the process that uses it",
                given={"pid": pid},
                allowed={"pid": self._pid},
            )
