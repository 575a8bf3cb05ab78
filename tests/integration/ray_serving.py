"""Requests to a service that Ray runs, and what its coordinator says."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.ray_launcher import RayService
from kvferry.cluster.ray_routing import RayRouting
from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.proto.ids import RequestId
from kvferry.proto.messages import Describe, Description
from kvferry.worker.model.sampling import SamplingParams


@asynccontextmanager
async def routing(service: RayService) -> AsyncIterator[Router]:
    settings = RouterSettings(request_timeout_s=30.0)
    async with RayRouting(service) as routing, routing.router(settings) as router:
        yield router


def request(name: str, max_tokens: int) -> EngineRequest:
    generator = random.Random(name)
    return EngineRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(generator.randrange(1, 250) for _ in range(40)),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def describe(service: RayService) -> Description:
    with closing(ControlClient(service.control_address, timeout_s=10)) as client:
        return client.ask(Describe(), Description)
