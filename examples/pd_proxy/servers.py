"""Which of several servers takes a request: the one that holds most of its prompt. Pure."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvferry.proto.ids import BlockHash

REST_S = 5.0
"""So long a server that did not answer is sent requests only if all others do not answer either."""

MAX_EXTRA_REQUESTS = 8
"""A server with more requests in flight than the least busy one and these comes after the others:
prompts that all begin alike would else end up on one server."""


class Server:
    """One vLLM server as the proxy sees it: what it was sent, and what it should still hold.

    Args:
        url: where it listens, such as "http://127.0.0.1:8100".
        max_blocks: it is believed to hold at most so many hash blocks, the ones used last.
    """

    def __init__(self, url: str, *, max_blocks: int) -> None:
        self.url = url
        self.in_flight = 0
        self.last_sent_s = 0.0
        self.rests_until_s = 0.0
        self._max_blocks = max_blocks
        self._held: OrderedDict[BlockHash, None] = OrderedDict()

    @contextmanager
    def taking(self, now_s: float) -> Iterator[None]:
        """Count a request as in flight here, from `now_s` (seconds of any one clock) on."""
        self.last_sent_s = now_s
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the first blocks of a prompt the server should hold."""
        for index, one in enumerate(hashes):
            if one not in self._held:
                return index
        return len(hashes)

    def remember(self, hashes: Sequence[BlockHash]) -> None:
        """Note that the server has computed or loaded a prompt's blocks."""
        # The first block last: a prefix without its beginning is of no use, so it is kept longest.
        for one in reversed(hashes):
            self._held[one] = None
            self._held.move_to_end(one)
        while len(self._held) > self._max_blocks:
            self._held.popitem(last=False)

    def failed(self, now_s: float) -> None:
        """Note that the server does not answer; if it has died, so have its blocks."""
        self.rests_until_s = now_s + REST_S
        self._held.clear()


def ranked(servers: Sequence[Server], hashes: Sequence[BlockHash], now_s: float) -> list[Server]:
    """Return the servers, the best one for a prompt first.

    That is the one that holds the longest prefix; of equals the one with the fewest requests in
    flight, then the one that was sent nothing for the longest time.
    """
    least = min((server.in_flight for server in servers), default=0)

    def key(server: Server) -> tuple[bool, bool, int, int, float]:
        is_crowded = server.in_flight > least + MAX_EXTRA_REQUESTS
        return (
            server.rests_until_s > now_s,
            is_crowded,
            -server.num_held(hashes),
            server.in_flight,
            server.last_sent_s,
        )

    return sorted(servers, key=key)
