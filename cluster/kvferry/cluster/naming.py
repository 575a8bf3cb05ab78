"""Names of everything kvferry creates in a Ray cluster, in one place."""

import secrets

from kvferry.proto.ids import InstanceId


def new_namespace() -> str:
    """Return a Ray namespace that no other service uses."""
    return f"kvferry-{secrets.token_hex(4)}"


COORDINATOR_NAME = "coordinator"


def rank_name(instance_id: InstanceId, rank: int) -> str:
    """Return the actor name of one rank."""
    return f"rank:{instance_id}:{rank}"
