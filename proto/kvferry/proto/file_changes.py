"""Have files changed since they were last looked at? Asks the system: a small shell."""

from collections.abc import Iterable
from pathlib import Path


class FileChanges:
    """Remembers the state of some files, from construction on.

    Raises:
        OSError: one of them is not there; so does `changed`.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._state()

    def changed(self) -> bool:
        """Return whether any file was written or replaced since this was last asked."""
        before, self._seen = self._seen, self._state()
        return self._seen != before

    def _state(self) -> tuple[tuple[int, int], ...]:
        states = (path.stat() for path in self._paths)
        # Whatever writes, renames or permits a file changes its ctime.
        return tuple((state.st_ino, state.st_ctime_ns) for state in states)
