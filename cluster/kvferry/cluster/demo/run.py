"""The demo from start to end: plan, launch, converse, stop, check."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.cluster.config import ServiceConfig
from kvferry.cluster.demo.check import check_outputs
from kvferry.cluster.demo.conversation import PromptWriter, plan_turns
from kvferry.cluster.demo.overlap import OverlapTimings, time_overlap
from kvferry.cluster.demo.plan import (
    limits_of,
    longest_requests,
    min_num_blocks,
    planned_pool,
    require_all_fit,
    require_memory,
)
from kvferry.cluster.demo.report import DemoResult
from kvferry.cluster.demo.serve import ExtraTimings, converse, time_extra_prompt
from kvferry.cluster.progress import Progress
from kvferry.cluster.ray_launcher import running_service
from kvferry.cluster.ray_routing import RayRouting
from kvferry.cluster.serving.pool_size import PoolPlan, pool_of
from kvferry.cluster.serving.router import Router, RouterSettings, Served
from kvferry.proto.layout_fit import require_layout_fits
from kvferry.proto.layout_text import layout_text
from kvferry.proto.messages import InstanceInfo
from kvferry.worker import host_memory
from kvferry.worker.model.loading import inspect_model
from kvferry.worker.model.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What the demo asks for, beside the service itself."""

    num_requests: int
    sampling: SamplingParams


class _Shown(NamedTuple):
    """What the routers have served and timed."""

    served: tuple[Served, ...]
    extra: ExtraTimings | None
    overlap: OverlapTimings | None


def run_demo(config: ServiceConfig, settings: DemoSettings, progress: Progress) -> DemoResult:
    """Serve the conversation on a service of its own and check every output.

    Raises:
        BadInputError: something can never work; nothing was started, or all of it is gone again.
        InstanceDiedError: an instance died and no other could take its requests.
        DeadlineError: something did not answer in time.
    """
    turns = plan_turns(settings.num_requests)
    progress(f"reading the model {config.model}")
    facts = inspect_model(config.model, dtype=config.dtype)
    writer = PromptWriter(facts.tokenizer, facts.eos_token_ids)
    longest = tuple(longest_requests(turns, writer, settings.sampling))
    # Of all roles before any pool: a larger pool helps no layout that the model cannot have.
    for role, layout in config.layouts.items():
        require_layout_fits(
            layout, facts.identity, hash_block_tokens=config.hash_block_tokens, who=role
        )
    for layout in config.layouts.values():
        pool = planned_pool(config, layout, facts.identity, facts.max_model_len)
        if pool is not None:
            require_all_fit(longest, limits_of(config, layout, facts.identity, pool))
    require_memory(config, facts.identity, memory_bytes=host_memory.total_bytes())
    with running_service(config, facts.identity, progress) as service:
        # Measured pools differ, and any instance may get any request.
        limits = []
        for launched in service.instances:
            pool = _tell_instance(launched.info, progress)
            limits.append(limits_of(config, launched.info.layout, facts.identity, pool))
            require_all_fit(longest, limits[-1])
        progress(f"control front at {service.control_address}")
        if service.metrics_address:
            place = f"http://{service.metrics_address}"
            progress(f"metrics at {place}/metrics, and where all of them are at {place}/targets")

        async def conversation() -> _Shown:
            async with RayRouting(service) as routing:
                async with routing.router(RouterSettings()) as router:
                    served = await converse(router, turns, writer, settings.sampling, progress)
                    roles = {i.info.instance_id: i.info.role for i in service.instances}
                    alive = {i: r for i, r in roles.items() if router.is_alive(i)}
                    extra = await time_extra_prompt(router, writer, alive, progress)

                def new_router(overlap: bool) -> AbstractAsyncContextManager[Router]:
                    return routing.router(RouterSettings(overlap=overlap))

                overlap = await time_overlap(new_router, writer, alive, progress)
            return _Shown(served, extra, overlap)

        shown = asyncio.run(conversation())
        instances = tuple(launched.info for launched in service.instances)
    return DemoResult(
        instances=instances,
        metrics_address=service.metrics_address or None,
        turns=turns,
        served=shown.served,
        comparisons=check_outputs(str(facts.folder), config.dtype, shown.served, progress),
        extra=shown.extra,
        overlap=shown.overlap,
        min_num_blocks=max(min_num_blocks(longest, one) for one in limits),
    )


def _tell_instance(info: InstanceInfo, progress: Progress) -> PoolPlan:
    pool = pool_of(info)
    ranks = ", ".join(
        f"rank {i} at {address} pid {pid}"
        for i, (address, pid) in enumerate(zip(info.rank_addresses, info.rank_pids, strict=True))
    )
    progress(f"{info.instance_id} ({info.role}): {ranks}")
    progress(f"{info.instance_id} has layout {layout_text(info.layout)} and {pool}")
    return pool
