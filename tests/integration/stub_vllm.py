"""HTTP servers that answer as vLLM's do, without a model, and tell what they were asked."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from examples.pd_proxy.proxy import Proxy, Settings

PARTS = (b'data: {"text": "on"}\n\n', b'data: {"text": "ce"}\n\n', b"data: [DONE]\n\n")


class StubVllm:
    """One server. A character is a token; an answer tells which server gave it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.raw: list[bytes] = []
        self.headers: list[Mapping[str, str]] = []
        self.transfer: Any = {"remote_engine_id": name}
        self.refusal: tuple[int, bytes] | None = None
        self.breaks_off = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.was_asked = asyncio.Event()
        self.was_left = asyncio.Event()
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    def prompts(self) -> list[str]:
        """Return the prompts that were to be generated from, in their order."""
        return [text_of(body) for path, body in self.asked if path != "/tokenize"]

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        tokens = [ord(one) for one in text_of(body)]
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        self.was_asked.set()
        try:
            if body.get("stream"):
                return await self._stream(request)
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.was_left.set()
            raise
        if self.refusal:
            status, raw = self.refusal
            return web.Response(status=status, body=raw, headers={"X-From": self.name})
        answer = {"id": self.name, "choices": [{"text": "on", "finish_reason": "length"}]}
        is_prefill = body.get("kv_transfer_params", {}).get("do_remote_decode")
        return web.json_response(
            {**answer, "kv_transfer_params": self.transfer if is_prefill else None}
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(PARTS[0])
        await self.may_answer.wait()
        if self.breaks_off:
            assert request.transport is not None
            request.transport.abort()
            return response
        for part in PARTS[1:]:
            await response.write(part)
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.name}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.refusal else 200)

    async def _note(self, request: web.Request) -> dict[str, Any]:
        raw = await request.read()
        body: dict[str, Any] = json.loads(raw) if raw.startswith(b"{") else {}
        self.asked.append((request.path, body))
        self.raw.append(raw)
        self.headers.append(request.headers)
        return body


def text_of(body: dict[str, Any]) -> str:
    """Return a prompt, or a chat's messages one after the other."""
    if "messages" in body:
        return "".join(message["content"] for message in body["messages"])
    text: str = body["prompt"]
    return text


@dataclass(frozen=True, kw_only=True)
class Service:
    """A proxy before its servers, and a client of it."""

    prefill: list[StubVllm]
    decode: list[StubVllm]
    client: aiohttp.ClientSession
    url: str

    async def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """Return the answer to a completion that is not streamed."""
        body = {"model": "m", "prompt": prompt, **options}
        async with self.client.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
            parsed: dict[str, Any] = await answer.json()
            return parsed

    async def who_serves(self, prompt: str) -> str:
        """Return the name of the decode server that answers."""
        name: str = (await self.complete(prompt))["id"]
        return name


@asynccontextmanager
async def running(
    *,
    prefill: int = 1,
    decode: int = 1,
    down: Sequence[str] = (),
    **settings: float,
) -> AsyncGenerator[Service]:
    """Run a proxy before stubs "prefill-0", ...; those named in `down` do not listen.

    Its hash blocks are of 4 tokens, and two that a decode server lacks are prefilled.
    """
    stubs = {
        role: [StubVllm(f"{role}-{index}") for index in range(count)]
        for role, count in (("prefill", prefill), ("decode", decode))
    }
    options: Any = {"block_tokens": 4, "min_prefill_blocks": 2, **settings}
    async with AsyncExitStack() as stack:
        for stub in (*stubs["prefill"], *stubs["decode"]):
            if stub.name in down:
                stub.url = f"http://127.0.0.1:{unused_port()}"
            else:
                stub.url = await started(stack, stub.app())
        urls = {role: [stub.url for stub in stubs[role]] for role in stubs}
        proxy = Proxy(urls["prefill"], urls["decode"], Settings(**options))
        url = await started(stack, proxy.app())
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Service(prefill=stubs["prefill"], decode=stubs["decode"], client=client, url=url)


async def started(stack: AsyncExitStack, app: web.Application) -> str:
    """Serve an application until the stack is closed, and return its URL."""
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(shutdown_timeout=1.0)
    stack.push_async_callback(server.close)
    return str(server.make_url("")).rstrip("/")
