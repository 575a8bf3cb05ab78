"""The P/D proxy of the examples over HTTP, before stubs that answer as vLLM's servers do.

The real engines behind it are tested in tests/engines.
"""

import asyncio
import functools
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import unused_port
from tests.integration.stub_vllm import PARTS, Service, StubVllm, running

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
LONG = "abcdefghijkl"  # three blocks of 4 tokens


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), DEADLINE_S))

    return run


async def held(service: Service, stub: StubVllm, prompt: str) -> asyncio.Task[dict[str, Any]]:
    """Send a prompt and return when `stub` has it, which answers only when told to."""
    stub.may_answer.clear()
    stub.was_asked.clear()
    task = asyncio.create_task(service.complete(prompt))
    await stub.was_asked.wait()
    return task


@in_a_loop
async def test_a_stream_is_passed_byte_for_byte_after_one_token_of_prefill() -> None:
    async with running() as service:
        (prefill,), (decode,) = service.prefill, service.decode
        body = {"model": "m", "prompt": LONG, "max_tokens": 9, "stream": True}
        prefill.transfer = {"remote_host": "h", "remote_port": 5}
        headers = {"Authorization": "Bearer key", "X-Request-Id": "r-1"}
        async with service.client.post(
            f"{service.url}/v1/completions", json=body, headers=headers
        ) as answer:
            assert await answer.read() == b"".join(PARTS)
            assert answer.headers["Content-Type"] == "text/event-stream"
        assert prefill.asked == [
            ("/tokenize", {"model": "m", "prompt": LONG}),
            (
                "/v1/completions",
                {
                    "model": "m",
                    "prompt": LONG,
                    "max_tokens": 1,
                    "stream": False,
                    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
                },
            ),
        ]
        params = {**prefill.transfer, "do_remote_decode": False, "do_remote_prefill": True}
        assert decode.asked == [("/v1/completions", body | {"kv_transfer_params": params})]
        for sent in (*prefill.headers, *decode.headers):
            assert (sent["Authorization"], sent["X-Request-Id"]) == ("Bearer key", "r-1")


@in_a_loop
async def test_the_first_part_of_a_stream_does_not_wait_for_the_others() -> None:
    async with running() as service:
        (decode,) = service.decode
        decode.may_answer.clear()
        body = {"prompt": "ab", "stream": True}
        async with service.client.post(f"{service.url}/v1/completions", json=body) as answer:
            assert await answer.content.readexactly(len(PARTS[0])) == PARTS[0]
            decode.may_answer.set()
            assert await answer.content.read() == b"".join(PARTS[1:])


@in_a_loop
async def test_a_chat_is_prefilled_with_its_own_limit_and_the_decode_server_answers() -> None:
    async with running() as service:
        (prefill,), (decode,) = service.prefill, service.decode
        chat = {"messages": [{"role": "user", "content": LONG}]}
        body = {"model": "m", **chat, "max_tokens": 9, "temperature": 0}
        async with service.client.post(f"{service.url}/v1/chat/completions", json=body) as answer:
            assert (await answer.json())["id"] == "decode-0"
        (_, question), (path, prefilled) = prefill.asked
        assert question == {"model": "m", **chat}
        assert path == "/v1/chat/completions"
        assert prefilled["max_completion_tokens"] == 1
        assert "max_tokens" not in prefilled
        ((path, decoded),) = decode.asked
        assert path == "/v1/chat/completions"
        assert decoded["max_tokens"] == 9
        assert decoded["kv_transfer_params"]["remote_engine_id"] == "prefill-0"


@in_a_loop
async def test_a_request_goes_on_unchanged_where_prefill_says_nothing_of_its_blocks() -> None:
    async with running() as service:
        (prefill,), (decode,) = service.prefill, service.decode
        prefill.transfer = None
        raw = b'{ "prompt" : "abcdefghijkl", "max_tokens": 9 }'
        async with service.client.post(f"{service.url}/v1/completions", data=raw) as answer:
            assert (await answer.json())["id"] == "decode-0"
        assert prefill.prompts() == [LONG]
        assert decode.raw == [raw]


@in_a_loop
async def test_what_a_prefill_server_says_in_no_known_form_is_not_passed_on() -> None:
    async with running() as service:
        (prefill,), (decode,) = service.prefill, service.decode
        prefill.transfer = "soon"
        await service.complete(LONG)
        assert "kv_transfer_params" not in decode.asked[-1][1]


@in_a_loop
async def test_what_a_decode_server_lacks_little_of_is_not_prefilled() -> None:
    async with running(decode=2) as service:
        (prefill,) = service.prefill
        assert await service.who_serves("short") == "decode-0"
        assert await service.who_serves(LONG) == "decode-1"
        assert prefill.prompts() == [LONG]
        assert await service.who_serves(LONG) == "decode-1"
        assert await service.who_serves(LONG + "mnop") == "decode-1"
        assert prefill.prompts() == [LONG]
        assert await service.who_serves(LONG + "mnopqrstuvwx") == "decode-1"
        assert prefill.prompts() == [LONG, LONG + "mnopqrstuvwx"]


@in_a_loop
async def test_prompts_go_to_the_servers_that_hold_most_of_them_and_others_in_turn() -> None:
    async with running(prefill=2, decode=2) as service:
        other = LONG.upper()
        assert await service.who_serves(LONG) == "decode-0"
        assert await service.who_serves(other) == "decode-1"
        # In turn, this one would be served by the first servers.
        assert await service.who_serves(other + "MNOPQRST") == "decode-1"
        assert await service.who_serves(LONG + "mnopqrst") == "decode-0"
        assert service.prefill[0].prompts() == [LONG, LONG + "mnopqrst"]
        assert service.prefill[1].prompts() == [other, other + "MNOPQRST"]


@in_a_loop
async def test_of_servers_that_hold_nothing_the_less_busy_one_is_taken() -> None:
    async with running(decode=2) as service:
        waiting = await held(service, service.decode[0], "one")
        assert [await service.who_serves(text) for text in ("a", "b")] == ["decode-1"] * 2
        service.decode[0].may_answer.set()
        assert (await waiting)["id"] == "decode-0"


@in_a_loop
async def test_requests_that_wait_for_their_prefill_count_where_they_will_be_decoded() -> None:
    async with running(decode=2) as service:
        waiting = await held(service, service.prefill[0], LONG)
        assert [await service.who_serves(text) for text in ("a", "b")] == ["decode-1"] * 2
        service.prefill[0].may_answer.set()
        assert (await waiting)["id"] == "decode-0"


@in_a_loop
async def test_token_ids_need_no_tokenizer_and_several_prompts_go_straight_to_decode() -> None:
    async with running() as service:
        (prefill,), (decode,) = service.prefill, service.decode
        url = f"{service.url}/v1/completions"
        async with service.client.post(url, json={"prompt": list(range(8))}) as answer:
            assert answer.status == 200
        assert [path for path, _ in prefill.asked] == ["/v1/completions"]
        async with service.client.post(url, json={"prompt": [LONG, LONG]}) as answer:
            assert answer.status == 200
        assert len(prefill.asked) == 1
        assert len(decode.asked) == 2


@in_a_loop
async def test_decode_computes_what_a_prefill_server_that_is_down_cannot() -> None:
    async with running(prefill=2, decode=2, down=["prefill-0"]) as service:
        assert await service.who_serves(LONG) == "decode-0"
        # Its tokens came from a decode server; from now on the other prefill server is asked.
        assert service.decode[0].asked[0][0] == "/tokenize"
        assert service.prefill[1].prompts() == [LONG]
        assert await service.who_serves(LONG.upper()) == "decode-1"
        assert service.prefill[1].prompts() == [LONG, LONG.upper()]


def test_a_prefill_server_that_fails_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    @in_a_loop
    async def scenario() -> None:
        async with running() as service:
            service.prefill[0].refusal = (500, b"out of memory")
            assert await service.who_serves(LONG) == "decode-0"
            assert "kv_transfer_params" not in service.decode[0].asked[0][1]
            (line,) = caplog.messages
            assert line == (
                f"{service.prefill[0].url}/v1/completions gave no answer: 500: out of memory"
            )

    with caplog.at_level(logging.WARNING, logger="pd_proxy"):
        scenario()


@in_a_loop
async def test_a_prefill_that_takes_too_long_is_given_up_and_its_request_cancelled() -> None:
    async with running(prefill_timeout_s=0.2) as service:
        waiting = await held(service, service.prefill[0], LONG)
        assert (await waiting)["id"] == "decode-0"
        await service.prefill[0].was_left.wait()


@in_a_loop
async def test_a_decode_server_that_is_down_or_not_ready_is_passed_over() -> None:
    async with running(decode=3, down=["decode-0"]) as service:
        service.decode[1].refusal = (503, b"starting")
        assert await service.who_serves(LONG) == "decode-2"
        # One prefill serves for all of them.
        assert service.prefill[0].prompts() == [LONG]
        assert service.decode[1].prompts() == [LONG]


@in_a_loop
async def test_without_a_decode_server_the_client_is_told_so() -> None:
    async with (
        running(decode=2, down=["decode-0", "decode-1"]) as service,
        service.client.post(f"{service.url}/v1/completions", json={"prompt": "a"}) as answer,
    ):
        assert answer.status == 502
        assert (await answer.json())["error"] == {
            "message": "no decode server takes requests",
            "type": "upstream_error",
            "param": None,
            "code": 502,
        }


@in_a_loop
async def test_an_error_of_a_decode_server_is_passed_on_as_it_is() -> None:
    async with running(decode=2) as service:
        service.decode[0].refusal = (400, b'{"error": "no such model"}')
        url = f"{service.url}/v1/completions"
        async with service.client.post(url, json={"prompt": "a"}) as answer:
            assert answer.status == 400
            assert answer.headers["X-From"] == "decode-0"
            assert await answer.read() == b'{"error": "no such model"}'
        assert service.decode[1].asked == []


@in_a_loop
async def test_a_body_that_nobody_can_read_is_left_to_the_server_to_refuse() -> None:
    async with running() as service:
        service.decode[0].refusal = (400, b"unreadable")
        url = f"{service.url}/v1/completions"
        async with service.client.post(url, data=b"no json") as answer:
            assert (answer.status, await answer.read()) == (400, b"unreadable")
        assert service.decode[0].raw == [b"no json"]


@in_a_loop
async def test_a_decode_server_that_stays_silent_ends_in_a_timeout() -> None:
    async with running(decode=2, read_timeout_s=0.2) as service:
        service.decode[0].may_answer.clear()
        url = f"{service.url}/v1/completions"
        async with service.client.post(url, json={"prompt": "a"}) as answer:
            assert answer.status == 504
            message = (await answer.json())["error"]["message"]
            assert message == f"{service.decode[0].url} did not answer in time"
        # It may be at work on it: another one is not asked the same.
        assert service.decode[1].asked == []
        await service.decode[0].was_left.wait()


@in_a_loop
async def test_a_stream_that_breaks_off_does_not_look_complete() -> None:
    async with running() as service:
        service.decode[0].breaks_off = True
        body = {"prompt": "a", "stream": True}
        async with service.client.post(f"{service.url}/v1/completions", json=body) as answer:
            assert await answer.content.readexactly(len(PARTS[0])) == PARTS[0]
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()


@in_a_loop
async def test_the_upstream_request_ends_when_the_client_leaves() -> None:
    async with running() as service:
        for stub, prompt in ((service.prefill[0], LONG), (service.decode[0], "a")):
            task = await held(service, stub, prompt)
            task.cancel()
            await stub.was_left.wait()
            stub.may_answer.set()
        (decode,) = service.decode
        decode.was_left.clear()
        decode.may_answer.clear()
        body = {"prompt": "a", "stream": True}
        async with service.client.post(f"{service.url}/v1/completions", json=body) as answer:
            await answer.content.readexactly(len(PARTS[0]))
            answer.close()
        await decode.was_left.wait()
        decode.may_answer.set()
        # Nothing of them counts as in flight.
        assert await service.who_serves("a") == "decode-0"


@in_a_loop
async def test_models_are_those_of_a_decode_server_and_health_is_that_of_all() -> None:
    async with running(decode=2, down=["decode-0"]) as service:
        async with service.client.get(f"{service.url}/v1/models") as answer:
            assert (await answer.json())["data"] == [{"id": "decode-1"}]
        async with service.client.get(f"{service.url}/health") as answer:
            assert answer.status == 200
            assert (await answer.json())["healthy"] == {
                service.prefill[0].url: True,
                service.decode[0].url: False,
                service.decode[1].url: True,
            }
        service.decode[1].refusal = (503, b"")
        async with service.client.get(f"{service.url}/health") as answer:
            assert answer.status == 503


def test_the_command_serves_and_lets_go_of_what_a_client_has_left() -> None:
    @in_a_loop
    async def scenario() -> None:
        async with running(prefill=0) as service:
            (decode,) = service.decode
            port = unused_port()
            command = [sys.executable, "-m", "examples.pd_proxy", "--decode", f"{decode.url}/"]
            process = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT)
            try:
                url = f"http://127.0.0.1:{port}"
                await until_healthy(service.client, url)
                decode.may_answer.clear()
                post = service.client.post(f"{url}/v1/completions", json={"prompt": "a"})
                task = asyncio.create_task(post.__aenter__())
                await decode.was_asked.wait()
                task.cancel()
                await decode.was_left.wait()
            finally:
                process.terminate()
                assert process.wait(DEADLINE_S) == 0

    scenario()


async def until_healthy(client: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            async with client.get(f"{url}/health") as answer:
                assert answer.status == 200
                return
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.02)
