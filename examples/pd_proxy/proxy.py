"""The proxy's HTTP side: a request goes to a prefill server where that pays, then to decode."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from examples.pd_proxy.bodies import (
    Body,
    decode_body,
    prefill_body,
    prompt_hashes,
    read_body,
    token_ids_in,
    tokenize_body,
)
from examples.pd_proxy.servers import Server, ranked
from multidict import CIMultiDict

from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import BlockHash

log = logging.getLogger("pd_proxy")

ASK_TIMEOUT_S = 10.0
"""For what a server answers without running its model: /tokenize, /health, /v1/models."""

MAX_BODY_BYTES = 256 * 2**20

# These belong to one connection, or are written anew for the next one.
_REQUEST_ONLY = {"host", "content-length", "content-encoding", "accept-encoding", "expect"}
_ONE_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the proxy behaves; times in seconds."""

    block_tokens: int = 16
    """Tokens of a hash block, by which the proxy compares prompts."""

    min_prefill_blocks: int = 16
    """Prompts of which the decode server lacks fewer full blocks go to it at once."""

    held_blocks: int = 100_000
    """A server is believed to hold so many hash blocks."""

    connect_timeout_s: float = 5.0
    prefill_timeout_s: float = 120.0
    """A prefill that takes longer is given up, and the decode server computes the prompt."""

    read_timeout_s: float = 600.0
    """The longest silence of a decode server: before an answer, or between two parts of one."""


class Proxy:
    """OpenAI-compatible completions and chat over prefill and decode servers.

    Args:
        prefill: URLs of the prefill servers; may be none.
        decode: URLs of the decode servers, at least one.
        settings: how to behave.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], settings: Settings) -> None:
        self._prefill = [Server(url, max_blocks=settings.held_blocks) for url in prefill]
        self._decode = [Server(url, max_blocks=settings.held_blocks) for url in decode]
        self._min_prefill_blocks = settings.min_prefill_blocks
        self._scheme = make_scheme(hash_block_tokens=settings.block_tokens)
        connect_s = settings.connect_timeout_s
        self._asking = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S, sock_connect=connect_s)
        self._prefilling = aiohttp.ClientTimeout(
            total=settings.prefill_timeout_s, sock_connect=connect_s
        )
        self._answering = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_s, sock_read=settings.read_timeout_s
        )

    def app(self) -> web.Application:
        """Return the application; run it with `handler_cancellation`.

        Without that, the requests of clients that have left run to their end.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._client)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    async def _client(self, _: web.Application) -> AsyncGenerator[None]:
        # A new connection costs nothing beside a request, and an old one may have been closed by
        # the server in this very moment. What is in an answer passes as it is.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False, skip_auto_headers=("Accept-Encoding",)
        ) as self._session:
            yield

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = read_body(raw)
        hashes = await self._hashes(request, body)
        servers = ranked(self._decode, hashes, time.monotonic())
        # It counts as busy with this request from now on, or all that wait for a prefill would
        # have chosen the same.
        with servers[0].taking(time.monotonic()):
            num_missing = len(hashes) - servers[0].num_held(hashes)
            if self._prefill and num_missing >= self._min_prefill_blocks:
                transfer = await self._prefilled(request, body, hashes)
                if transfer:
                    raw = _to_json(decode_body(body, transfer))
        return await self._answer(request, servers, self._answering, raw=raw, hashes=hashes)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        servers = ranked(self._decode, (), time.monotonic())
        return await self._answer(request, servers, self._asking)

    async def _health(self, _: web.Request) -> web.Response:
        """Answer 200 while a decode server is healthy, and say which servers are."""
        servers = [*self._prefill, *self._decode]
        healthy = await asyncio.gather(*map(self._is_healthy, servers))
        by_url = {server.url: is_well for server, is_well in zip(servers, healthy, strict=True)}
        serves = any(healthy[len(self._prefill) :])
        return web.json_response({"healthy": by_url}, status=200 if serves else 503)

    async def _is_healthy(self, server: Server) -> bool:
        try:
            async with self._session.get(f"{server.url}/health", timeout=self._asking) as answer:
                return answer.ok
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _hashes(self, request: web.Request, body: Body) -> tuple[BlockHash, ...]:
        token_ids = token_ids_in(body)
        if token_ids is None and (question := tokenize_body(body)) is not None:
            token_ids = await self._tokenized(request, question)
        return prompt_hashes(self._scheme, body, token_ids or [])

    async def _tokenized(self, request: web.Request, question: Body) -> list[int] | None:
        """Return a prompt's token ids from a prefill server, or if it fails from a decode one."""
        now_s = time.monotonic()
        best = [*ranked(self._prefill, (), now_s)[:1], *ranked(self._decode, (), now_s)[:1]]
        for server in best:
            answer = await self._ask(request, server, "/tokenize", question, self._asking)
            token_ids = None if answer is None else answer.get("tokens")
            if isinstance(token_ids, list) and all(type(one) is int for one in token_ids):
                return token_ids
        return None

    async def _prefilled(
        self, request: web.Request, body: Body, hashes: tuple[BlockHash, ...]
    ) -> Body | None:
        """Let a prefill server compute the prompt; return what it says of the blocks, if any."""
        now_s = time.monotonic()
        server = ranked(self._prefill, hashes, now_s)[0]
        with server.taking(now_s):
            question = prefill_body(body)
            answer = await self._ask(request, server, request.path, question, self._prefilling)
        if answer is None:
            return None
        server.remember(hashes)
        transfer = answer.get("kv_transfer_params")
        return transfer if isinstance(transfer, dict) else None

    async def _ask(
        self,
        request: web.Request,
        server: Server,
        path: str,
        body: Body,
        timeout: aiohttp.ClientTimeout,
    ) -> Body | None:
        """Return the JSON object that a server answers; None, and a line in the log, if none."""
        try:
            async with self._session.post(
                server.url + path,
                data=_to_json(body),
                headers=_passed_on(request.headers, _REQUEST_ONLY | _ONE_HOP),
                timeout=timeout,
            ) as answer:
                found = await answer.json() if answer.ok else None
                if isinstance(found, dict):
                    return found
                reason = f"{answer.status}: {(await answer.text())[:500]}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            server.failed(time.monotonic())
            reason = _said(error)
        log.warning("%s%s gave no answer: %s", server.url, path, reason)
        return None

    async def _answer(
        self,
        request: web.Request,
        servers: Sequence[Server],
        timeout: aiohttp.ClientTimeout,
        *,
        raw: bytes | None = None,
        hashes: tuple[BlockHash, ...] = (),
    ) -> web.StreamResponse:
        """Pass the request to the first server that takes it, and its answer to the client."""
        for server in servers:
            with server.taking(time.monotonic()):
                try:
                    upstream = await self._session.request(
                        request.method,
                        server.url + request.path_qs,
                        data=raw,
                        headers=_passed_on(request.headers, _REQUEST_ONLY | _ONE_HOP),
                        timeout=timeout,
                    )
                except aiohttp.SocketTimeoutError:
                    return _error(504, f"{server.url} did not answer in time")
                except (aiohttp.ClientError, TimeoutError) as error:
                    server.failed(time.monotonic())
                    log.warning("%s does not take requests: %s", server.url, _said(error))
                    continue
                async with upstream:
                    if upstream.status == 503 and server is not servers[-1]:
                        log.warning("%s is not ready (503)", server.url)
                        continue
                    return await _stream(request, upstream, server, hashes)
        return _error(502, "no decode server takes requests")


async def _stream(
    request: web.Request,
    upstream: aiohttp.ClientResponse,
    server: Server,
    hashes: tuple[BlockHash, ...],
) -> web.StreamResponse:
    """Pass an answer to the client byte for byte, as it comes."""
    is_first_part = True
    response = web.StreamResponse(
        status=upstream.status,
        reason=upstream.reason,
        headers=_passed_on(upstream.headers, _ONE_HOP),
    )
    try:
        await response.prepare(request)
        async for part in upstream.content.iter_any():
            if is_first_part and upstream.ok:
                server.remember(hashes)
            is_first_part = False
            await response.write(part)
        await response.write_eof()
    except (aiohttp.ClientError, TimeoutError) as error:
        log.warning("an answer of %s broke off: %s", server.url, _said(error))
        # It must not look complete to the client.
        if request.transport is not None:
            request.transport.abort()
    return response


def _passed_on(headers: Mapping[str, str], without: set[str]) -> CIMultiDict[str]:
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in without
    )


def _to_json(body: Body) -> bytes:
    return json.dumps(body).encode()


def _said(error: Exception) -> str:
    # Some have no text of their own.
    return f"{type(error).__name__}: {error}"


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "upstream_error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
