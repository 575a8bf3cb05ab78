"""The tokens of a service as their file has them now, so that they can change while it runs."""

import logging

from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import ConfigError
from kvferry.proto.file_changes import FileChanges

_log = logging.getLogger(__name__)


class CurrentTokens:
    """Reads the file again when it has changed. Thread-safe.

    Args:
        credentials: with a token file.

    Raises:
        ConfigError: the file cannot be used; later on the last good tokens stay.
    """

    def __init__(self, credentials: Credentials) -> None:
        assert credentials.token_file is not None
        self._credentials = credentials
        self._file = FileChanges([credentials.token_file])
        self._tokens = credentials.read_tokens()

    def read(self) -> tuple[str, ...]:
        """Return all tokens, that which clients send first."""
        try:
            if self._file.changed():
                self._tokens = self._credentials.read_tokens()
        except ConfigError as error:
            _log.warning("the tokens stay as they were, since the new ones fail: %s", error)
        return self._tokens
