"""The P/D proxy of the examples before real vLLM servers: what it passes on is what they say."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from examples.pd_proxy.proxy import Proxy, Settings
from tests.engines.vllm_servers import counted, running_servers

TEXT = "The stations of the coastal line lie between the harbour and the lighthouse. " * 12


@dataclass(frozen=True)
class Servers:
    """The URLs of a prefill and a decode server, and the name of their model."""

    prefill: str
    decode: str
    model: str


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("vllm")
    with running_servers(model, 2, log_folder=logs) as (prefill, decode):
        yield Servers(prefill, decode, model.name)


@asynccontextmanager
async def proxied(servers: Servers) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
    """Yield a client, and the URL of a proxy before the servers."""
    proxy = Proxy([servers.prefill], [servers.decode], Settings(min_prefill_blocks=4))
    async with TestServer(proxy.app()) as server, aiohttp.ClientSession() as client:
        yield client, str(server.make_url("")).rstrip("/")


async def text_of(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    """Return the text that is answered to a completion or a chat, streamed or not."""
    path = "chat/completions" if "messages" in body else "completions"
    async with client.post(f"{url}/v1/{path}", json=body) as answer:
        raw = await answer.text()
    assert answer.status == 200, raw
    if not body["stream"]:
        parts = [json.loads(raw)]
    else:
        *events, done = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
        assert done == "[DONE]"
        parts = [json.loads(event) for event in events]
    choices = [part["choices"][0] for part in parts]
    return "".join(
        choice["text"]
        if "text" in choice
        else choice.get("delta", choice.get("message"))["content"] or ""
        for choice in choices
    )


def requests(model: str) -> list[dict[str, Any]]:
    """Return completions and chats about several subjects, streamed and not."""
    common = {"model": model, "temperature": 0, "max_tokens": 12}
    return [
        {**common, "stream": stream, **prompt}
        for number in range(3)
        for stream in (False, True)
        for prompt in (
            {"prompt": f"{number}. {TEXT}"},
            {"messages": [{"role": "user", "content": f"{TEXT} Which is the {number}th?"}]},
        )
    ]


def test_answers_are_those_of_one_server_and_each_prompt_is_prefilled_once(
    servers: Servers,
) -> None:
    async def scenario() -> None:
        async with proxied(servers) as (client, url):
            bodies = requests(servers.model)
            wanted = [await text_of(client, servers.decode, body) for body in bodies]
            assert all(wanted)
            found = [await text_of(client, url, body) for body in bodies]
            assert found == wanted
            assert await asyncio.gather(*(text_of(client, url, body) for body in bodies)) == wanted
            # Three completions differ from their beginning on; the chats only at their end, so the
            # decode server has most of each but the first.
            name = "vllm:request_success_total"
            assert await counted(client, servers.prefill, name) == 4

    asyncio.run(scenario())


def test_an_error_reads_as_vllm_wrote_it(servers: Servers) -> None:
    async def scenario() -> None:
        async with proxied(servers) as (client, url):
            answers = []
            for base in (servers.decode, url):
                body = {"model": "no such model", "prompt": TEXT}
                async with client.post(f"{base}/v1/completions", json=body) as answer:
                    answers.append((answer.status, await answer.json()))
            assert answers[0] == answers[1]
            assert answers[0][0] == 404

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_the_generation(servers: Servers) -> None:
    async def scenario() -> None:
        async with proxied(servers) as (client, url):
            name = "vllm:num_requests_running"
            body = {"model": servers.model, "prompt": "One", "max_tokens": 3000, "stream": True}
            async with client.post(
                f"{url}/v1/completions", json={**body, "ignore_eos": True}
            ) as answer:
                await answer.content.readline()
                assert await counted(client, servers.decode, name) == 1
                answer.close()
            # To its end it would take minutes.
            async with asyncio.timeout(10):
                while await counted(client, servers.decode, name):
                    await asyncio.sleep(0.05)

    asyncio.run(scenario())
