"""Engines whose coordinator is killed and made anew by Ray while they serve: nobody notices."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray
from tests.integration.token_engines import TokenService, request, token_service
from tests.integration.token_model import SCHEME, answer, prompt

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.coordinator_process import FrontAddresses, FrontSettings
from kvferry.cluster.ray_coordinator import OPTIONS, RayCoordinatorActor
from kvferry.cluster.ray_handles import end_actors, get
from kvferry.cluster.ray_record import RayRecord, find_front
from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import Epoch, InstanceId
from kvferry.proto.messages import Command, Describe, Description, InstanceCommand, Reply, expect

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ray_api: Any = ray  # parts of Ray's interface are not typed
WHO = "the coordinator"
TIMEOUT_S = 10.0
PROMPT_TOKENS, OUTPUT_TOKENS = 26, 20
WHOLE_BLOCK_TOKENS = 24
FRESH = 1000
"""From this number on nobody else sends the prompts."""

PASS_S = 0.002
"""A pass of the model; it would be over in no time otherwise, and nothing in flight at a death."""

NUM_CALLERS = 4


class RayCoordinator:
    """All lives of a coordinator on Ray: engines reach its front, everybody else its actor."""

    def __init__(self) -> None:
        self._service_id = naming.new_service_id()
        self._actor = (
            ray_api.remote(**OPTIONS)(RayCoordinatorActor)
            .options(name=naming.coordinator_name(self._service_id))
            .remote(
                service_id=self._service_id,
                fronts=FrontSettings(),
                scheme=SCHEME,
                check_invariants=True,
            )
        )
        addresses: FrontAddresses = get(self._actor.start.remote(), timeout_s=30.0, who=WHO)
        self._front = CoordinatorClient(addresses.control, None, find_front(self._service_id))

    def start(self) -> Epoch:
        return expect(self.call(Describe()), Description).epoch

    def call(self, command: Command) -> Reply:
        if isinstance(command, InstanceCommand):
            return self._front.call(command, timeout_s=TIMEOUT_S)
        reply: Reply = get(self._actor.call.remote(command), timeout_s=TIMEOUT_S, who=WHO)
        return reply

    def kill(self) -> None:
        ask = self._actor.__ray_call__.remote(lambda _: os.getpid())
        os.kill(get(ask, timeout_s=TIMEOUT_S, who=WHO), signal.SIGKILL)

    def stop(self) -> None:
        self._front.close()
        end_actors([self._actor], 1.0)
        RayRecord(self._service_id).delete()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with ray_cluster.connected("local", num_ranks=1, namespace=naming.new_namespace()):
            yield


@pytest.fixture
def service(cluster: None) -> Iterator[TokenService]:
    """A prefill instance and two that decode, in this process."""
    with token_service(make_coordinator=RayCoordinator) as one:
        for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode")):
            instance = one.add(name, role, num_blocks=1000)  # type: ignore[arg-type]
            instance.model.before_run = lambda _: time.sleep(PASS_S)
        yield one


@asynccontextmanager
async def routing(service: TokenService) -> Any:
    router = service.router()
    await router.start()
    try:
        yield router
    finally:
        await router.close()


class Traffic:
    """Callers that send one prompt after another, old and new ones, until they are stopped."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._is_over = False
        self.num_served = 0

    async def __aenter__(self) -> "Traffic":
        self._callers = [asyncio.create_task(self._call(number)) for number in range(NUM_CALLERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._callers)

    async def more(self, number: int) -> None:
        """Wait until so many more have been served."""
        wanted = self.num_served + number
        end_s = time.monotonic() + 30.0
        while self.num_served < wanted:
            assert time.monotonic() < end_s
            failed = [one for one in self._callers if one.done()]
            assert not failed, failed[0].exception()
            await asyncio.sleep(0.01)

    async def _call(self, caller: int) -> None:
        turn = 0
        while not self._is_over:
            number = 100 * caller + turn % 5 + turn // 10
            await serve(self._router, f"{caller}-{turn}", number)
            self.num_served += 1
            turn += 1


async def serve(router: Router, name: str, number: int, route: Route | None = None) -> Served:
    """Serve a prompt; the output must be that of an undisturbed run, whatever happens meanwhile."""
    tokens = prompt(number, PROMPT_TOKENS)
    served = await router.serve(request(name, tokens, OUTPUT_TOKENS), route=route)
    assert served.output_token_ids == answer(tokens, OUTPUT_TOKENS)
    parts = served.accounting
    assert (
        parts.local_hit_tokens + parts.remote_hit_tokens + parts.computed_tokens
        == parts.prompt_tokens
    )
    return served


async def all_back(service: TokenService, epoch: int) -> None:
    """Wait until the coordinator is in this life, and everybody has told it everything."""
    end_s = time.monotonic() + 20.0
    while True:
        try:
            described = await service.call(Describe(), timeout_s=TIMEOUT_S)
            assert isinstance(described, Description)
            members = [one for one in described.instances if one.state == "live"]
            if len(members) == len(service.instances):
                assert described.epoch == epoch
                return
        except KvferryError:
            pass
        assert time.monotonic() < end_s, "not everybody has come back"
        await asyncio.sleep(0.02)


async def survive(service: TokenService, num_deaths: int) -> None:
    assert isinstance(service.coordinator, RayCoordinator)
    first, there, elsewhere = service.epoch, route_to("d0"), route_to("d1")
    async with routing(service) as router:
        async with Traffic(router) as traffic:
            for death in range(1, num_deaths + 1):
                await serve(router, f"before-{death}", FRESH + death, there)
                await traffic.more(8)
                await asyncio.to_thread(service.coordinator.kill)
                await all_back(service, first + death)
                # What was cached before is found at its holder.
                again = await serve(router, f"again-{death}", FRESH + death, elsewhere)
                assert again.accounting.remote_hit_tokens == WHOLE_BLOCK_TOKENS
            await traffic.more(8)
        handed_over = await serve(router, "handed over", FRESH)
        assert handed_over.prefill_instance == "p"
        assert handed_over.accounting.remote_hit_tokens == WHOLE_BLOCK_TOKENS
    await asyncio.to_thread(service.require_nothing_held)


def route_to(name: str) -> Route:
    return Route(decode=InstanceId(name), prefill=None)


def test_outputs_are_those_of_an_undisturbed_run_when_the_coordinator_is_killed(
    service: TokenService,
) -> None:
    asyncio.run(survive(service, 1))


@pytest.mark.long
def test_outputs_are_those_of_an_undisturbed_run_when_it_is_killed_five_times(
    service: TokenService,
) -> None:
    asyncio.run(survive(service, 5))
