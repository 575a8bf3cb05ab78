"""Names of everything kvferry creates in a Ray cluster, in one place.

A driver may run several services at once, so every name holds its service's id.
"""

import secrets

from kvferry.proto.ids import InstanceId


def new_namespace() -> str:
    """Return a Ray namespace that no other driver uses."""
    return f"kvferry-{secrets.token_hex(4)}"


def new_service_id() -> str:
    """Return an id that no other service has, nor an earlier life of the same one."""
    return secrets.token_hex(4)


def coordinator_name(service_id: str) -> str:
    """Return the actor name of a service's coordinator."""
    return f"coordinator:{service_id}"


def rank_name(service_id: str, instance_id: InstanceId, rank: int) -> str:
    """Return the actor name of one rank."""
    return f"rank:{service_id}:{instance_id}:{rank}"


def group_name(service_id: str, instance_id: InstanceId) -> str:
    """Return the name of the placement group that holds an instance's ranks."""
    return f"instance:{service_id}:{instance_id}"
