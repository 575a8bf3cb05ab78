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
from tests.engines.vllm_servers import running_servers

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
    options = (
        "--kv-transfer-config",
        json.dumps(connector(pd_service.address)),
        "--enable-prompt-tokens-details",
    )
    logs = tmp_path_factory.mktemp("vllm")
    with running_servers(model, 2, options, log_folder=logs) as urls:
        yield urls


async def streamed(
    client: aiohttp.ClientSession, url: str, model: str, prompt: list[int]
) -> tuple[list[int], int]:
    """Return the tokens of a streamed completion, and how many of the prompt were not computed."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        raw = await answer.text()
    assert answer.status == 200, raw
    *events, done = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert done == "[DONE]"
    parts = [json.loads(event) for event in events]
    found = [token for part in parts for one in part["choices"] for token in one["token_ids"] or ()]
    return found, parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_fifty_streams_are_equal_and_the_decode_server_computes_one_block_a_prompt_at_most(
    model: Path, servers: list[str], pd_service: Service, plain: Engine
) -> None:
    wanted = [one["tokens"] for one in plain.generate(*PROMPTS, max_tokens=MAX_TOKENS)]

    async def scenario() -> list[tuple[list[int], int]]:
        proxy = Proxy([servers[0]], [servers[1]], Settings(min_prefill_blocks=4))
        async with TestServer(proxy.app()) as server, aiohttp.ClientSession() as client:
            url = str(server.make_url("")).rstrip("/")
            at_once = asyncio.Semaphore(4)

            async def one(prompt: list[int]) -> tuple[list[int], int]:
                async with at_once:
                    return await streamed(client, url, model.name, prompt)

            return await asyncio.gather(*map(one, PROMPTS))

    found = asyncio.run(scenario())
    assert [one for one, _ in found] == wanted
    for prompt, (_, num_cached) in zip(PROMPTS, found, strict=True):
        assert len(prompt) - num_cached <= BLOCK_TOKENS
    (status,) = pd_service.instances()
    assert status.held.reservations == status.held.loads == 0
