"""Prefill and decode on two vLLM servers, each in vLLM's own processes, that share by kvferry."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from examples.pd_proxy.proxy import Proxy, Settings
from tests.engines.conftest import Service, make_service, tokens
from tests.engines.engines import Engine, connector
from tests.engines.vllm_servers import counted, running_servers

NUM_REQUESTS = 50
BLOCK_TOKENS = 32
PROMPTS = [tokens(200 + i, 150 + 3 * i) for i in range(NUM_REQUESTS)]
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def pd_service() -> Iterator[Service]:
    yield from make_service(1 << 30)


@pytest.fixture(scope="module")
def servers(
    model: Path, pd_service: Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    options = ("--kv-transfer-config", json.dumps(connector(pd_service.address)))
    logs = tmp_path_factory.mktemp("vllm")
    with running_servers(model, 2, options, log_folder=logs) as urls:
        yield urls


async def streamed(
    client: aiohttp.ClientSession, url: str, model: str, prompt: list[int]
) -> list[int]:
    """Return the tokens of a streamed completion."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        raw = await answer.text()
    assert answer.status == 200, raw
    *events, done = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert done == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return [token for choice in choices for token in choice["token_ids"] or ()]


async def external_tokens(client: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return how many tokens a server asked its connector for, and how many it was given.

    The usage in its answers does not tell: a decode server reports the prefill server's hits there.
    """
    return {
        name: await counted(client, url, f"vllm:external_prefix_cache_{name}_total")
        for name in ("queries", "hits")
    }


def test_fifty_streams_are_equal_and_the_decode_server_computes_one_block_a_prompt_at_most(
    model: Path, servers: list[str], pd_service: Service, plain: Engine
) -> None:
    wanted = [one["tokens"] for one in plain.generate(*PROMPTS, max_tokens=MAX_TOKENS)]

    async def scenario() -> tuple[list[list[int]], dict[str, float]]:
        proxy = Proxy([servers[0]], [servers[1]], Settings(min_prefill_blocks=4))
        async with TestServer(proxy.app()) as server, aiohttp.ClientSession() as client:
            url = str(server.make_url("")).rstrip("/")
            at_once = asyncio.Semaphore(4)

            async def one(prompt: list[int]) -> list[int]:
                async with at_once:
                    return await streamed(client, url, model.name, prompt)

            found = await asyncio.gather(*map(one, PROMPTS))
            return found, await external_tokens(client, servers[1])

    found, counts = asyncio.run(scenario())
    assert found == wanted
    # A prompt hits at most its whole blocks short of the last token, so the sum tells of each.
    most = sum((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS)
    assert counts == {"queries": sum(map(len, PROMPTS)), "hits": most}
    (status,) = pd_service.instances()
    assert status.held.reservations == status.held.loads == 0
