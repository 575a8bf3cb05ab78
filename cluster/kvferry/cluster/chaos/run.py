"""A chaos run from start to end: an undisturbed run, faults, rest, and what is left."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from kvferry.cluster.chaos import processes
from kvferry.cluster.chaos.book import ANSWER_TOKENS, Conversation, write_conversations
from kvferry.cluster.chaos.counts import differences
from kvferry.cluster.chaos.faults import Fault, faults
from kvferry.cluster.chaos.judging import judge
from kvferry.cluster.chaos.plan import ChaosPlan
from kvferry.cluster.chaos.report import ChaosResult, Struck
from kvferry.cluster.chaos.service import WholeService
from kvferry.cluster.chaos.strikes import strike, target_of
from kvferry.cluster.chaos.traffic import (
    NUM_CALLERS,
    REQUEST_TIMEOUT_S,
    Tally,
    Traffic,
    request,
)
from kvferry.cluster.config import ServiceConfig
from kvferry.cluster.progress import Progress
from kvferry.cluster.ray_launcher import running_service
from kvferry.cluster.ray_nodes import running_nodes
from kvferry.cluster.ray_routing import RayRouting
from kvferry.cluster.serving.pool_size import KvSize
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.cluster.serving.routing import Route
from kvferry.cluster.signals import interrupts_held
from kvferry.proto.errors import InvariantError, UnavailableError
from kvferry.worker.model.loading import ModelFacts, inspect_model

ROUTER = RouterSettings(request_timeout_s=REQUEST_TIMEOUT_S)
NUM_NODES = 3
NUM_BLOCKS = 96
"""Less than all conversations need, so that blocks are evicted all the time."""


def run_chaos(model: str, plan: ChaosPlan, progress: Progress) -> ChaosResult:
    """Run everything and return what came of it; no process is left behind.

    Ray's logs are kept if anything was not as it should be.

    Args:
        model: folder or hub id.
        plan: what is asked for.
        progress: is told in one line each.

    Raises:
        KvferryError: the cluster or the service cannot be started, or fails without any fault.
    """
    progress(f"reading the model {model}")
    facts = inspect_model(model)
    conversations = write_conversations(facts.tokenizer, plan.seed)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-chaos-"))
    keeps_logs = False
    try:
        result = _run(plan, facts, conversations, folder, progress)
        keeps_logs = bool(result.problems)
        return result
    except Exception:
        keeps_logs = True
        raise
    finally:
        with interrupts_held():
            # An interrupt may have come while a node was made, of which nobody knows then.
            processes.end_all(folder)
            if keeps_logs:
                progress(f"Ray's logs are kept in {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)


def _run(
    plan: ChaosPlan,
    facts: ModelFacts,
    conversations: Sequence[Conversation],
    folder: Path,
    progress: Progress,
) -> ChaosResult:
    progress(f"starting a Ray cluster of {NUM_NODES} nodes and a head")
    with running_nodes(folder, NUM_NODES) as nodes:
        config = ServiceConfig(
            model=str(facts.folder),
            kv_size=KvSize(num_blocks=NUM_BLOCKS),
            ray_address=nodes.address,
        )
        with running_service(config, facts.identity, progress) as service:

            async def disturbed() -> ChaosResult:
                async with RayRouting(service) as routing, routing.router(ROUTER) as router:
                    whole = WholeService(service, router, nodes, folder)
                    return await _Run(plan, whole, conversations, progress).run()

            result = asyncio.run(disturbed())
    return judge(result, str(facts.folder), progress)


class _Run:
    def __init__(
        self,
        plan: ChaosPlan,
        whole: WholeService,
        conversations: Sequence[Conversation],
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._whole = whole
        self._conversations = conversations
        self._progress = progress
        self._struck: list[Struck] = []

    async def run(self) -> ChaosResult:
        self._progress("undisturbed run: what the answers are")
        await _undisturbed(self._whole.router, self._conversations)
        await self._meet("before")
        start = await self._whole.counts_when(lambda now: now.is_at_rest)
        if start is None:
            raise UnavailableError("the coordinator does not answer, before any fault")
        self._progress(f"{self._plan.minutes:g} minutes of faults")
        traffic = Traffic(self._whole.router, self._conversations, self._plan.seed)
        async with traffic:
            await self._disturb(traffic.tally)
        self._progress("no more faults: everything once more, and then rest")
        if await self._whole.recovered() is None:
            traffic.tally.unclear.append("after the last fault the service was not whole again")
        else:
            await traffic.everything()
            await self._meet("after")
        end = await self._whole.counts_when(lambda now: not differences(start, now))
        return ChaosResult(
            plan=self._plan,
            tally=traffic.tally,
            struck=tuple(self._struck),
            start=start,
            end=end,
        )

    async def _meet(self, when: str) -> None:
        """Let every instance pull from every other: each such pair keeps some sockets.

        Raises:
            KvferryError: a request failed, although nothing is wrong.
        """
        whole = await self._whole.recovered()
        ids = [] if whole is None else [one.info.instance_id for one in whole.instances]
        prompt = self._conversations[0].prompts[0]
        for first, second in permutations(ids, 2):
            for place in (first, second):
                name = f"{when} {first} {second}"
                asked = request(f"{name} {place}", prompt, salt=name)
                await self._whole.router.serve(asked, route=Route(decode=place, prefill=None))

    async def _disturb(self, tally: Tally) -> None:
        end_s = time.monotonic() + 60.0 * self._plan.minutes
        for fault in faults(self._plan.seed, self._plan.kinds):
            await asyncio.sleep(min(fault.calm_s, max(end_s - time.monotonic(), 0.0)))
            if time.monotonic() >= end_s:
                return
            struck = await self._strike(fault)
            self._struck.append(struck)
            self._progress(f"{struck}; {tally}")
            if struck.recovery_s is None:
                return

    async def _strike(self, fault: Fault) -> Struck:
        before = await self._whole.recovered()
        if before is None:
            return Struck(fault=fault, victim="nobody", recovery_s=None)
        whole = self._whole
        target = target_of(fault, before, whole.nodes.raylets(), whole.folder)
        if not target.hit:
            return Struck(fault=fault, victim=f"{target.name} (not found)", recovery_s=None)
        self._progress(f"{fault.kind}: {target.name}")
        await strike(fault, target)
        began_s = time.monotonic()
        recovered = await whole.recovered(after=target.ends) is not None
        return Struck(
            fault=fault,
            victim=target.name,
            recovery_s=time.monotonic() - began_s if recovered else None,
        )


async def _undisturbed(router: Router, conversations: Sequence[Conversation]) -> None:
    """Note the answer to every prompt.

    Raises:
        InvariantError: one has another length than was asked for, or its tokens do not add up.
    """

    async def read(part: Sequence[Conversation]) -> None:
        for conversation in part:
            for turn, prompt in enumerate(conversation.write()):
                name = f"undisturbed-{id(conversation)}-{turn}"
                served = await router.serve(request(name, prompt, salt="undisturbed"))
                # What is compared with it would be as empty.
                if len(served.output_token_ids) != ANSWER_TOKENS or not served.accounting.adds_up:
                    raise InvariantError(f"{name} went wrong, before any fault", given=str(served))
                conversation.answers.append(served.output_token_ids)

    async with asyncio.TaskGroup() as group:
        for caller in range(NUM_CALLERS):
            group.create_task(read(conversations[caller::NUM_CALLERS]))
