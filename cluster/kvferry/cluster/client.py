"""The public Python client, for engines of one's own, inside Ray or not.

    with connect("127.0.0.1:7000") as ferry:
        cache = ferry.model(identity)          # refuses an identity nobody serves, by field
        num_tokens = cache.fetch(token_ids, into=layers)
        ...                                    # compute the rest of the prompt
        cache.store(token_ids, layers)
        reader = ferry.events(instance_id)     # what an instance has cached, where that is told

Tokens are hashed here, under the service's scheme, and a block is what one hash covers, whatever
the blocks of the instances are; only full blocks count. Tensors have, per layer, the shape
[2 (K, V), num_tokens, num_kv_heads, head_size] in the identity's KV dtype, on any device. A fetch
or a lookup that finds nothing is a miss (0), never an error.
"""

from typing import Self

from kvferry.cluster.client_cache import Hit, ModelCache
from kvferry.cluster.client_lease import Lease
from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.kv_events_subscriber import KvEventsSubscriber, SubscriberSettings
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import BadInputError, NotFoundError
from kvferry.proto.identity import Identity, identity_to_plain, require_equal_identities
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Describe, Description
from kvferry.proto.scheme import HashScheme
from kvferry.worker.transfer_client import TransferClient

__all__ = ["Ferry", "Hit", "Lease", "ModelCache", "connect"]


def connect(
    address: str, *, timeout_s: float = 10.0, credentials: Credentials | None = None
) -> "Ferry":
    """Connect to a service's control front and read its hash scheme.

    Args:
        address: `host:port` of the front.
        timeout_s: deadline of every call in seconds (at most 300), unless the call takes its own.
        credentials: for a service that speaks TLS: at least the authorities of its certificates;
            None speaks plaintext.

    Raises:
        ConfigError: a malformed address or timeout, or a file that cannot be used.
        CredentialsError: one side does not take the other's certificate or token.
        UnavailableError: nobody listens there.
        DeadlineError: no answer within `timeout_s`.
    """
    control = ControlClient(address, timeout_s, credentials)
    try:
        return Ferry(control, credentials)
    except BaseException:
        control.close()
        raise


class Ferry:
    """A connection to one service; made by `connect`. Thread-safe. Close it, or use `with`."""

    def __init__(self, control: ControlClient, credentials: Credentials | None) -> None:
        self._control = control
        self._transfer = TransferClient(credentials)
        self.scheme: HashScheme = self.describe().scheme

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Repeatable."""
        self._control.close()
        self._transfer.close()

    def describe(self) -> Description:
        """Return the service as it is now: instances, leases, counters.

        Raises:
            UnavailableError, DeadlineError: the service does not answer.
        """
        return self._control.ask(Describe(), Description)

    def identities(self) -> tuple[Identity, ...]:
        """Return the identities that live instances serve, each once, in order of registration.

        Raises:
            UnavailableError, DeadlineError: the service does not answer.
        """
        return tuple(dict.fromkeys(status.info.identity for status in self.describe().instances))

    def events(self, instance_id: InstanceId) -> KvEventsSubscriber:
        """Return a reader of one instance's KV events, to be polled and closed by the caller.

        It begins with what the instance's publisher remembers; `held` is what the instance has.

        Raises:
            NotFoundError: no such instance, or its events cannot be read.
            UnavailableError, DeadlineError: the service does not answer.
        """
        places = {
            status.info.instance_id: status.kv_events
            for status in self.describe().instances
            if status.kv_events is not None
        }
        place = places.get(instance_id)
        if place is None:
            raise NotFoundError(
                "no KV events of this instance", given=instance_id, allowed=sorted(places)
            )
        return KvEventsSubscriber(
            SubscriberSettings(
                endpoint=place.endpoint,
                replay_endpoint=place.replay_endpoint,
                topic=place.topic,
            )
        )

    def model(self, identity: Identity) -> "ModelCache":
        """Return the cache of one identity.

        While the service has no instance at all, any identity is taken.

        Raises:
            BadInputError: not an identity.
            IdentityMismatchError: no instance serves it; the fields that differ from the most
                similar identity are named.
            UnavailableError, DeadlineError: the service does not answer.
        """
        if not isinstance(identity, Identity):
            raise BadInputError(
                "not an identity", given=repr(identity), allowed="a kvferry.proto.identity.Identity"
            )
        served = self.identities()
        if served and identity not in served:
            wanted = identity_to_plain(identity)
            nearest = min(
                served,
                key=lambda one: sum(
                    wanted[name] != value for name, value in identity_to_plain(one).items()
                ),
            )
            require_equal_identities(nearest, identity, who="this engine")
        return ModelCache(self._control, self._transfer, self.scheme, identity)
