"""What a demo run needs at least, known before anything is started."""

import math
import os
from collections.abc import Iterator

from kvferry.cluster.config import ServiceConfig
from kvferry.cluster.demo.conversation import PromptWriter, Turn
from kvferry.cluster.serving.limits import Limits, require_fits
from kvferry.cluster.serving.pool_size import PoolPlan, plan_pool
from kvferry.cluster.serving.requests import EngineRequest
from kvferry.proto.errors import ConfigError
from kvferry.proto.group_specs import specs_of
from kvferry.proto.identity import Identity
from kvferry.proto.ids import RequestId
from kvferry.proto.layout import Layout
from kvferry.worker.model.sampling import SamplingParams

EXTRA_MAX_TOKENS = 2
MAX_RANKS_PER_CORE = 16


def longest_requests(
    turns: tuple[Turn, ...], writer: PromptWriter, sampling: SamplingParams
) -> Iterator[EngineRequest]:
    """Yield every request as long as it can become: each earlier answer of `max_tokens` tokens."""
    lengths: dict[int, int] = {}
    for turn in turns:
        if turn.session not in lengths:
            length = len(writer.first_turn(turn.question))
        else:
            past = lengths[turn.session]
            length = writer.longest_next_turn(past, sampling.max_tokens, turn.question)
        lengths[turn.session] = length
        yield _of_length(turn.request_id, length, sampling)
    extra = SamplingParams(max_tokens=EXTRA_MAX_TOKENS)
    yield _of_length("extra", len(writer.extra_prompt(0)), extra)


def min_num_blocks(requests: tuple[EngineRequest, ...], limits: Limits) -> int:
    """Return the smallest pool (null block included) in which each request fits alone."""
    return max(limits.needed_blocks(request) for request in requests)


def require_all_fit(requests: tuple[EngineRequest, ...], limits: Limits) -> None:
    """Refuse a run in which some request could never be served.

    Raises:
        PromptTooLongError, NeverFitsError: naming the request that needs most.
    """
    for request in sorted(requests, key=limits.needed_blocks, reverse=True):
        require_fits(request, limits)


def planned_pool(
    config: ServiceConfig, layout: Layout, identity: Identity, model_len: int
) -> PoolPlan | None:
    """Return the pool that instances of a layout will have; None where only measuring can tell.

    `model_len` is the number of tokens that the model has positions for.

    Raises:
        ConfigError: as `plan_pool`.
    """
    size = config.kv_size
    if size.memory_fraction is not None:
        return None
    return plan_pool(
        identity,
        who="each instance",
        layout=layout,
        token_budget=config.token_budget,
        model_len=model_len,
        max_model_len=config.max_model_len,
        num_blocks=size.num_blocks,
        kv_bytes=size.kv_bytes or 0,
    )


def limits_of(config: ServiceConfig, layout: Layout, identity: Identity, pool: PoolPlan) -> Limits:
    """Return what an engine of this layout with this pool can take."""
    return Limits(
        num_blocks=pool.num_blocks,
        block_tokens=layout.virtual_block_tokens,
        max_model_len=pool.max_model_len,
        token_budget=config.token_budget,
        max_running=config.max_running,
        specs=specs_of(identity, layout.virtual_block_tokens),
        policy=config.policy,
    )


def require_memory(config: ServiceConfig, identity: Identity, *, memory_bytes: int) -> None:
    """Refuse pools that this machine's memory cannot hold, when all ranks are to run on it.

    Args:
        config: of the service.
        identity: of the model.
        memory_bytes: of this machine.

    Raises:
        ConfigError: with the sizes of both.
    """
    if config.ray_address != "local":
        return
    size, num_ranks = config.kv_size, config.num_ranks
    max_ranks = MAX_RANKS_PER_CORE * (os.cpu_count() or 1)
    if num_ranks > max_ranks:
        raise ConfigError(
            "so many ranks, a process each, are too many for this machine",
            given={"ranks": num_ranks},
            allowed={"ranks": f"at most {max_ranks}"},
        )
    if size.memory_fraction is not None:
        each = math.floor(1000 / num_ranks) / 1000
        if size.memory_fraction * num_ranks > 1:
            raise ConfigError(
                f"{num_ranks} ranks on one machine cannot take such a part of it each",
                given={"memory_fraction": size.memory_fraction},
                allowed=f"memory_fraction <= {each:g}",
            )
        return
    block_bytes = max(identity.block_bytes(one.block_tokens) for one in config.layouts.values())
    pool_bytes = size.kv_bytes or (size.num_blocks or 0) * block_bytes
    if pool_bytes * num_ranks > memory_bytes:
        each_bytes = memory_bytes // num_ranks
        raise ConfigError(
            f"the pools of {num_ranks} ranks do not fit this machine",
            given={"kv_bytes": pool_bytes * num_ranks, "memory_bytes": memory_bytes},
            allowed=f"num_blocks <= {each_bytes // block_bytes}, or kv_bytes <= {each_bytes}",
        )


def _of_length(request_id: str, num_tokens: int, sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(request_id), prompt_token_ids=(0,) * num_tokens, sampling=sampling
    )
