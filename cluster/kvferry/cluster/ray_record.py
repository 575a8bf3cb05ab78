"""The record of a service in Ray's own key-value store, which lives as long as the cluster.

The interface is not a public one of Ray's, so nothing else uses it.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RpcError
from ray.experimental import internal_kv

from kvferry.cluster.moving_address import FindAddress
from kvferry.cluster.record import FRONTS
from kvferry.proto.errors import NotFoundError, UnavailableError

control_store: Any = internal_kv  # its types do not say what it returns
TIMEOUT_S = 2.0
_NAMESPACE = b"kvferry"


class RayRecord:
    """`Record` of one service, from any process that is connected to the cluster.

    Args:
        service_id: as in `naming`.
    """

    def __init__(self, service_id: str) -> None:
        self._prefix = f"{service_id}/"

    def read(self, name: str) -> dict[str, Any]:
        """See `Record.read`."""
        found = self._ask("internal_kv_get", self._key(name), _NAMESPACE)
        value: dict[str, Any] = {} if found is None else json.loads(found)
        return value

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """See `Record.write`."""
        self._ask("internal_kv_put", self._key(name), json.dumps(value).encode(), True, _NAMESPACE)

    def delete(self) -> None:
        """Forget all values.

        Raises:
            UnavailableError: the store does not answer.
        """
        self._ask("internal_kv_del", self._prefix.encode(), True, _NAMESPACE)

    def _key(self, name: str) -> bytes:
        return (self._prefix + name).encode()

    def _ask(self, method: str, *arguments: Any) -> Any:
        client = control_store.internal_kv_get_gcs_client()
        if client is None:
            raise UnavailableError("this process is not connected to a Ray cluster")
        try:
            return getattr(client, method)(*arguments, timeout=TIMEOUT_S)
        except RpcError as error:
            raise UnavailableError(f"Ray's control store does not answer: {error}") from None


def find_front(service_id: str) -> FindAddress:
    """Return what tells where engines of all nodes reach the front of a service's coordinator."""
    return functools.partial(_front, service_id)


def _front(service_id: str) -> str:
    fronts = RayRecord(service_id).read(FRONTS)
    if not fronts:
        raise NotFoundError("no coordinator of this service has served yet", given=service_id)
    address: str = fronts["control"]
    return address
