"""Which instance decodes, and whether a prefill instance should go first. Pure.

A missing hash block costs little when a peer holds it (it is pulled) and much when nobody does
(it is computed), but the latter cost is the same wherever the request goes. What is left to weigh
is pulling against queueing behind other requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Holder

PULL_COST = 0.1
"""Cost of pulling a token, in tokens computed."""

REQUEST_COST_TOKENS = 64.0
"""Cost of one request already in flight there, in tokens computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes; `prefill` is None when the decode instance computes what is missing."""

    decode: InstanceId
    prefill: InstanceId | None


def choose_route(
    holders: tuple[Holder, ...],
    in_flight: Mapping[InstanceId, int],
    *,
    num_prompt_hashes: int,
    min_prefill_hashes: int,
    hash_block_tokens: int,
) -> Route | None:
    """Return the cheapest route, or None when no decode instance is alive.

    Args:
        holders: all live instances of the model with the hashes of the prefix that each holds.
        in_flight: the router's own count of requests per instance.
        num_prompt_hashes: full hash blocks of the prompt, short of its last token.
        min_prefill_hashes: send to a prefill instance only if nobody holds so many of them.
        hash_block_tokens: tokens of a hash block.
    """
    decoders = [holder for holder in holders if holder.role == "decode"]
    if not decoders:
        return None
    held_anywhere = min(max(holder.num_hashes for holder in holders), num_prompt_hashes)
    prefillers = [holder for holder in holders if holder.role == "prefill"]
    held_tokens = held_anywhere * hash_block_tokens
    decode = _cheapest(decoders, in_flight, held_tokens, hash_block_tokens)
    if not prefillers or num_prompt_hashes - held_anywhere < min_prefill_hashes:
        return Route(decode=decode, prefill=None)
    return Route(
        decode=decode, prefill=_cheapest(prefillers, in_flight, held_tokens, hash_block_tokens)
    )


def _cheapest(
    candidates: list[Holder],
    in_flight: Mapping[InstanceId, int],
    held_tokens: int,
    hash_block_tokens: int,
) -> InstanceId:
    def cost(holder: Holder) -> tuple[float, InstanceId]:
        instance_id = holder.source.instance_id
        to_pull = max(held_tokens - holder.num_hashes * hash_block_tokens, 0)
        queue = in_flight.get(instance_id, 0)
        return to_pull * PULL_COST + queue * REQUEST_COST_TOKENS, instance_id

    return min(candidates, key=cost).source.instance_id
