"""The ranks that compute one instance's sequences together, and what they exchange.

An instance of layout `grid` has pcp * dcp ranks, dcp the faster. Every rank does the same calls in
the same order; a call ends when the ranks it concerns have made theirs, or with an error once
`timeout_s` have passed. After an error nobody can tell which call the others are in, so the group
is over: every later call is refused, and the ranks meet again in a new one.
"""

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from kvferry.proto.errors import ConfigError, UnavailableError
from kvferry.proto.layout import Layout
from kvferry.proto.listening import why_not_listening

# torch's process groups are typed in parts only.
c10d: Any = distributed

T = TypeVar("T")


class MeetingPoint:
    """Where the ranks of a group find each other: a small server in the process of rank 0.

    It must be kept until the group is over. Whoever reaches it may take part, so anything but
    loopback is for the caller to refuse.

    Args:
        host: the host it listens on, on a free port.

    Raises:
        ConfigError: `host` is not an address of this machine.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise why_not_listening(host, 0, error) from None
        port = listener.getsockname()[1]
        # Left to itself, the store would listen on every interface.
        self._store = c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.address = f"{host}:{port}"


class RankGroup:
    """One rank's part in a group of ranks; made by all of them at once.

    Args:
        name: of the group, for messages.
        layout: of kind grid, with more than one token shard and tp = pp = 1.
        rank: which rank of the layout this is.
        meeting_address: `MeetingPoint.address`.
        host: where this rank listens for the others.
        timeout_s: how long a call, or the making of the group, waits for another rank.

    Raises:
        ConfigError: a layout that is not computed so, a rank that it does not have, or a host that
            is not an address of this machine.
        UnavailableError: not all ranks came.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        *,
        rank: int,
        meeting_address: str,
        host: str,
        timeout_s: float,
    ) -> None:
        _require_computable(layout)
        self.name = name
        self.layout = layout
        self.rank = rank
        self.token_shard = layout.place(rank).token_shard
        self.pcp_rank, self.dcp_rank = divmod(rank, layout.dcp)
        self._open = True
        meeting_host, _, port = meeting_address.rpartition(":")
        wait = timedelta(seconds=timeout_s)
        options = _options(host, wait)

        def meet() -> tuple[Any, Any]:
            store = c10d.TCPStore(meeting_host, int(port), is_master=False, timeout=wait)

            def among(place: str, index: int, size: int) -> Any:
                return c10d.ProcessGroupGloo(c10d.PrefixStore(place, store), index, size, options)

            everyone = among("all", rank, layout.num_ranks)
            if layout.pcp == 1:
                return everyone, None
            return everyone, among(f"rows-{self.dcp_rank}", self.pcp_rank, layout.pcp)

        # `_row_ranks`: those of one dcp rank, which deal the rows of a pass among themselves.
        self._all_ranks, self._row_ranks = self._attempt(meet)

    def join_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all pcp ranks, in their order.

        Args:
            rows: shape [num_rows, ...], on the CPU, the same on every rank.

        Returns:
            shape [pcp * num_rows, ...].

        Raises:
            UnavailableError: a rank did not answer, or the group is over.
        """
        if self.layout.pcp == 1:
            return rows
        joined = rows.new_empty((self.layout.pcp, *rows.shape))
        parts, own = list(joined), rows.contiguous()
        self._attempt(lambda: self._row_ranks.allgather([parts], [own]).wait())
        return joined.flatten(0, 1)

    def exchange_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Send every rank what this one has for its rows, and return what all have for this one's.

        Args:
            rows: shape [pcp * num_rows, ...], on the CPU, in the order of `join_rows`.

        Returns:
            shape [num_ranks, num_rows, ...]: one part from each rank.

        Raises:
            UnavailableError: a rank did not answer, or the group is over.
        """
        layout = self.layout
        of_pcp_rank = rows.reshape(layout.pcp, -1, *rows.shape[1:])
        sent = of_pcp_rank.repeat_interleave(layout.dcp, dim=0)
        received = torch.empty_like(sent)
        self._attempt(lambda: self._all_ranks.alltoall_base(received, sent, [], []).wait())
        return received

    def bring_to_first(self, rows: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor | None:
        """Bring rows that the pcp ranks have different numbers of to rank 0.

        Args:
            rows: shape [num_rows[pcp_rank], ...], on the CPU; not looked at where dcp_rank > 0.
            num_rows: how many each pcp rank has.

        Returns:
            shape [sum(num_rows), ...] at rank 0, None elsewhere.

        Raises:
            UnavailableError: a rank did not answer, or the group is over.
        """
        if self.dcp_rank:
            return None
        if self.pcp_rank:
            own = [rows.contiguous()]
            if num_rows[self.pcp_rank]:
                self._attempt(lambda: self._row_ranks.send(own, 0, 0).wait())
            return None
        parts = [rows]
        for source, count in enumerate(num_rows[1:], start=1):
            if count:
                parts.append(self._receive(source, rows.new_empty((count, *rows.shape[1:]))))
        return torch.cat(parts)

    def close(self) -> None:
        """End this rank's part; the others' calls fail without waiting for their timeout."""
        self._open = False
        self._all_ranks = self._row_ranks = None

    def _receive(self, source: int, rows: torch.Tensor) -> torch.Tensor:
        self._attempt(lambda: self._row_ranks.recv([rows], source, 0).wait())
        return rows

    def _attempt(self, call: Callable[[], T]) -> T:
        if not self._open:
            raise UnavailableError("the group of ranks is over", given=self._said())
        try:
            return call()
        # torch reports every failure of a peer, a timeout too, as RuntimeError.
        except RuntimeError as error:
            self.close()
            reason = str(error).strip().splitlines()[0]
            raise UnavailableError(
                "another rank of the group stopped or does not answer",
                given=self._said() | {"reason": reason},
            ) from error

    def _said(self) -> dict[str, Any]:
        return {"group": self.name, "rank": self.rank, "ranks": self.layout.num_ranks}


def _options(host: str, wait: timedelta) -> Any:
    try:
        device = c10d.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError:
        raise ConfigError(
            "cannot listen on this host", given=host, allowed="an address of this machine"
        ) from None
    # torch offers no other way to say on which interface gloo listens.
    options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001
    options._timeout = wait  # noqa: SLF001
    options._devices = [device]  # noqa: SLF001
    return options


def _require_computable(layout: Layout) -> None:
    axes = {"kind": layout.kind, "tp": layout.tp, "pp": layout.pp, "pcp * dcp": layout.token_shards}
    if layout.kind != "grid" or layout.tp * layout.pp > 1 or layout.token_shards == 1:
        raise ConfigError(
            "a group of ranks computes sequences whose tokens are dealt, and nothing else is",
            given=axes,
            allowed={"kind": "grid", "tp": 1, "pp": 1, "pcp * dcp": ">= 2"},
        )
