"""Whether processes can share memory here: not in every sandbox, and not on every processor."""

import pytest

from kvferry.worker.arena import open_arena
from kvferry.worker.paths import this_place


def arenas_work() -> bool:
    return open_arena(1) is not None and this_place() != ""


needs_arenas = pytest.mark.skipif(
    not arenas_work(), reason="this system has no sealed memory without names"
)
