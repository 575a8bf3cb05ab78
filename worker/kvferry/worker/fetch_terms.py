"""Whom a fetch goes to, and what it may cost its caller."""

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from kvferry.proto.errors import DeadlineError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import Incarnation, LeaseId
from kvferry.proto.layout import Layout
from kvferry.worker.destination import Destination
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import FetchAsk


class CancelledPullError(Exception):
    """The caller of a pull gave it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One rank of another instance: its `address` ("host:port"), and what and where its blocks are.

    `incarnation` is the life of it that is meant.
    """

    address: str
    identity: Identity
    layout: Layout
    rank: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTerms:
    """Under which lease, until when (`end_s`, on the monotonic clock), and whether still wanted."""

    lease_id: LeaseId
    end_s: float
    cancel: threading.Event

    def require_s(self) -> float:
        """Return the seconds left.

        Raises:
            DeadlineError: none are left.
            CancelledPullError: the caller gave the pull up.
        """
        self.require_wanted()
        left_s = self.end_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("the deadline of a pull has passed", given=f"{-left_s:.3f} s ago")
        return left_s

    def require_wanted(self) -> None:
        """Raise CancelledPullError if the caller has given the pull up."""
        if self.cancel.is_set():
            raise CancelledPullError


class Fetcher(Protocol):
    """What a pull needs: `TransferClient`, or what stands for it in the simulator."""

    def fetch(
        self,
        peer: Peer,
        ask: FetchAsk,
        destination: Destination,
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        """As `TransferClient.fetch`."""

    def close(self) -> None:
        """End what is open; fetches under way end with UnavailableError."""
