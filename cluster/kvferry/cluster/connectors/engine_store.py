"""The store that an engine saves into, and the service behind it."""

import logging
import threading
from collections.abc import Sequence

from kvferry.cluster.attached_store import AttachedStore
from kvferry.cluster.client_lease import Lease, acquire_lease, new_call_id
from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.engine_info import EngineInfo
from kvferry.cluster.engine_roll import HEARTBEAT_S
from kvferry.cluster.node_client import NodeClient
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import KvferryError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import FIRST_GROUP, BlockHash, InstanceId
from kvferry.proto.messages import (
    Describe,
    Description,
    Forgotten,
    Holder,
    Locate,
    Located,
    ResetIdentity,
)
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import Source
from kvferry.worker.transfer_client import TransferClient

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


class EngineStore:
    """Thread-safe.

    Args:
        address: `host:port` of a node's front.
        timeout_s: deadline of each call in seconds, unless the call takes its own.
        credentials: what it shows to the service, and asks of it; None speaks plaintext.

    Raises:
        UnavailableError, DeadlineError: nobody answers at the address.
        ConfigError: a malformed address or timeout.
    """

    def __init__(self, address: str, *, timeout_s: float, credentials: Credentials | None) -> None:
        self._control = ControlClient(address, timeout_s, credentials)
        self._node = NodeClient(address, credentials)
        self._transfer = TransferClient(credentials)
        self.scheme: HashScheme = self._control.ask(Describe(), Description, START_TIMEOUT_S).scheme
        self._attached: AttachedStore | None = None
        self._keeper: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def store_id(self) -> InstanceId | None:
        """The store's name; None while there is none."""
        attached = self._attached
        return None if attached is None else attached.instance_id

    @property
    def store_address(self) -> str | None:
        """Where it takes blocks; None while there is none."""
        attached = self._attached
        return None if attached is None else attached.transfer_address

    def attach(self, identity: Identity, engine: EngineInfo) -> None:
        """Have a store for the identity, and from now on another when that one is gone.

        Args:
            identity: the engine's.
            engine: as the node shows it to people.

        Raises:
            ResourcesError: the node has no room for it.
            UnavailableError, DeadlineError: the node or the coordinator does not answer.
        """
        self._attached = self._node.attach(identity, timeout_s=START_TIMEOUT_S, engine=engine)
        self._keeper = threading.Thread(
            target=self._keep_attached, args=[identity, engine], name="kvferry-attach", daemon=True
        )
        self._keeper.start()

    def take(
        self,
        address: str,
        *,
        identity: Identity,
        hashes: Sequence[BlockHash],
        first_block: int,
        source: Source,
        timeout_s: float,
    ) -> int:
        """Tell a store to fetch blocks; see `TransferClient.take`."""
        return self._transfer.take(
            address,
            identity=identity,
            group_id=FIRST_GROUP,
            hashes=hashes,
            first_block=first_block,
            source=source,
            timeout_s=timeout_s,
        )

    def holds(self, address: str, *, identity: Identity, hashes: Sequence[BlockHash]) -> bool:
        """Return whether the store at an address holds all of the blocks.

        Raises:
            UnavailableError, DeadlineError: the service does not answer.
        """
        return any(
            address in holder.source.rank_addresses and holder.num_hashes == len(hashes)
            for holder in self.holders(identity, hashes)
        )

    def holders(self, identity: Identity, hashes: Sequence[BlockHash]) -> tuple[Holder, ...]:
        """Return who holds how much of a prefix, the longest first.

        Raises:
            UnavailableError, DeadlineError: the service does not answer.
        """
        command = Locate(identity_digest=identity.digest(), hashes=tuple(hashes))
        return self._control.ask(command, Located).holders

    def reset(self, identity: Identity) -> None:
        """Make everything unfindable that stores hold of an identity.

        Raises:
            UnavailableError, DeadlineError: the service does not answer.
        """
        command = ResetIdentity(call_id=new_call_id(), identity_digest=identity.digest())
        self._control.ask(command, Forgotten)

    def lease(
        self, identity: Identity, hashes: Sequence[BlockHash], instance_id: InstanceId, ttl_s: float
    ) -> Lease:
        """Keep a prefix at one instance.

        Raises:
            NotFoundError: no such instance.
            UnavailableError, DeadlineError: the service does not answer.
        """
        return acquire_lease(
            self._control,
            identity.digest(),
            hashes,
            block_tokens=self.scheme.hash_block_tokens,
            ttl_s=ttl_s,
            timeout_s=self._control.timeout_s,
            instance_id=instance_id,
        )

    def close(self) -> None:
        """Close all connections. Repeatable."""
        self._closed.set()
        # Ends the call that the keeper may wait for.
        self._node.close()
        if self._keeper is not None:
            self._keeper.join(timeout=STOP_TIMEOUT_S)
        self._control.close()
        self._transfer.close()

    def _keep_attached(self, identity: Identity, engine: EngineInfo) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            try:
                attached = self._node.attach(identity, timeout_s=START_TIMEOUT_S, engine=engine)
            except KvferryError as error:
                if self._attached is not None and not self._closed.is_set():
                    _log.warning("the store of this engine is gone: %s", error)
                attached = None
            if attached is not None and attached != self._attached:
                _log.warning("this engine saves to %s now", attached.instance_id)
            self._attached = attached
