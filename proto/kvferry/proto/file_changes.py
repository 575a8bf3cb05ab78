"""Have files changed since they were last looked at? Asks the system: a small shell."""

from collections.abc import Iterable
from pathlib import Path


class FileChanges:
    """Remembers the state of some files, from construction on."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._state()

    def changed(self) -> bool:
        """Return whether any file was written, replaced or removed since this was last asked."""
        before, self._seen = self._seen, self._state()
        return self._seen != before

    def _state(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(map(_state_of, self._paths))


def _state_of(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    # Whatever writes, renames or permits a file changes its ctime.
    return state.st_ino, state.st_ctime_ns
