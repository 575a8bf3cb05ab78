"""Names of everything kvferry creates in a Ray cluster, in one place.

A driver may run several services at once, so every name holds its service's id. A service of nodes
has a name that people choose as its id, and is found by it in one namespace.
"""

import re
import secrets

from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import InstanceId

SERVICES_NAMESPACE = "kvferry"
DEFAULT_SERVICE = "kvferry"
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")


def require_service_name(name: str) -> None:
    """Refuse what cannot name a service of nodes.

    Raises:
        ConfigError: not 1 to 63 letters, digits, dots, dashes and underscores.
    """
    if not _SERVICE.fullmatch(name):
        raise ConfigError(
            "not a name for a service",
            given=name,
            allowed="1 to 63 letters, digits, '.', '-' and '_', a letter or digit first",
        )


def new_namespace() -> str:
    """Return a Ray namespace that no other driver uses."""
    return f"kvferry-{secrets.token_hex(4)}"


def new_service_id() -> str:
    """Return an id that no other service has, nor an earlier life of the same one."""
    return secrets.token_hex(4)


def coordinator_name(service_id: str) -> str:
    """Return the actor name of a service's coordinator."""
    return f"coordinator:{service_id}"


def node_name(service_id: str, host: str) -> str:
    """Return the actor name of a service's node on one host."""
    return f"node:{service_id}:{host}"


def host_of_node(service_id: str, actor_name: str) -> str | None:
    """Return the host that `node_name` made an actor's name of; None for any other actor's."""
    prefix = node_name(service_id, "")
    return actor_name.removeprefix(prefix) if actor_name.startswith(prefix) else None


def rank_name(service_id: str, instance_id: InstanceId, rank: int) -> str:
    """Return the actor name of one rank."""
    return f"rank:{service_id}:{instance_id}:{rank}"


def group_name(service_id: str, instance_id: InstanceId) -> str:
    """Return the name of the placement group that holds an instance's ranks."""
    return f"instance:{service_id}:{instance_id}"


def outside_ray() -> str:
    """Return the id of a node that Ray knows nothing of."""
    return ""
