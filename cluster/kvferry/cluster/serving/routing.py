"""Which instance decodes, and whether a prefill instance should go first. Pure.

A missing hash block costs little when a peer holds it (it is pulled) and much when nobody does
(it is computed), but the latter cost is the same wherever the request goes. What is left to weigh
is pulling against queueing behind other requests.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Role

PULL_COST = 0.1
"""Cost of pulling a token, in tokens computed."""

REQUEST_COST_TOKENS = 64.0
"""Cost of one request already in flight there, in tokens computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes; `prefill` is None when the decode instance computes what is missing."""

    decode: InstanceId
    prefill: InstanceId | None


def without(
    roles: Mapping[InstanceId, Role], avoid: Collection[InstanceId]
) -> dict[InstanceId, Role]:
    """Return the instances but those to be avoided, except where a role has no others."""
    left = {role for instance_id, role in roles.items() if instance_id not in avoid}
    return {i: role for i, role in roles.items() if i not in avoid or role not in left}


def choose_route(
    roles: Mapping[InstanceId, Role],
    held_hashes: Mapping[InstanceId, int],
    in_flight: Mapping[InstanceId, int],
    *,
    num_prompt_hashes: int,
    min_prefill_hashes: int,
    hash_block_tokens: int,
) -> Route | None:
    """Return the cheapest route, or None when no decode instance is alive.

    Args:
        roles: all live instances of the model.
        held_hashes: of the prefix, so many does an instance hold; absent if none.
        in_flight: the router's own count of requests per instance.
        num_prompt_hashes: full hash blocks of the prompt, short of its last token.
        min_prefill_hashes: send to a prefill instance only if nobody holds so many of them.
        hash_block_tokens: tokens of a hash block.
    """
    held_anywhere = min(max(held_hashes.values(), default=0), num_prompt_hashes)

    def cost(instance_id: InstanceId) -> tuple[float, InstanceId]:
        to_pull = max(held_anywhere - held_hashes.get(instance_id, 0), 0) * hash_block_tokens
        queue = in_flight.get(instance_id, 0)
        return to_pull * PULL_COST + queue * REQUEST_COST_TOKENS, instance_id

    decoders = [instance_id for instance_id, role in roles.items() if role == "decode"]
    if not decoders:
        return None
    decode = min(decoders, key=cost)
    prefillers = [instance_id for instance_id, role in roles.items() if role == "prefill"]
    if not prefillers or num_prompt_hashes - held_anywhere < min_prefill_hashes:
        return Route(decode=decode, prefill=None)
    return Route(decode=decode, prefill=min(prefillers, key=cost))
