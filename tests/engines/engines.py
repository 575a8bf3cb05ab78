"""vLLM engines in the interpreter that KVFERRY_VLLM_PYTHON names, for tests."""

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

PYTHON = os.environ.get("KVFERRY_VLLM_PYTHON")
REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
SETTINGS = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 4096,
    "block_size": 32,
    "seed": 0,
    "disable_log_stats": False,
}


def environment() -> dict[str, str]:
    """Return the variables that vLLM needs on a CPU."""
    folders = ("cluster", "coordinator", "proto", "worker")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / folder) for folder in folders),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def connector(address: str, **settings: Any) -> dict[str, Any]:
    """Return vLLM's settings for our connector."""
    return {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry.cluster.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": settings.pop("policy", "recompute"),
        "kv_connector_extra_config": {"ferry.address": address}
        | {f"ferry.{name}": value for name, value in settings.items()},
    }


class Engine:
    """One running engine."""

    def __init__(self, model: Path, variables: dict[str, str], settings: dict[str, Any]) -> None:
        assert PYTHON is not None
        self.process = subprocess.Popen(
            [
                PYTHON,
                str(Path(__file__).parent / "vllm_engine.py"),
                json.dumps({**SETTINGS, "model": str(model), **settings}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), **variables},
            text=True,
        )
        self._answers: Queue[dict[str, Any] | None] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.seconds = 0.0

    def wait_ready(self) -> None:
        answer = self._answers.get(timeout=START_TIMEOUT_S)
        assert answer is not None, "the engine did not start"

    def ask(self, command: str, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.receive()

    def send(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        answer = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        assert answer is not None, "the engine died"
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.seconds = answer["seconds"]
        return answer["value"]

    def generate(self, *prompts: Sequence[int], max_tokens: int = 1, **fields: Any) -> list[Any]:
        requests = [{"tokens": list(one), "max_tokens": max_tokens, **fields} for one in prompts]
        found: list[Any] = self.ask("generate", requests=requests)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._answers.put(json.loads(line))
        self._answers.put(None)


@contextlib.contextmanager
def running_engines(
    model: Path, *settings: dict[str, Any], variables: dict[str, str] | None = None
) -> Iterator[list[Engine]]:
    """Start engines at the same time, and yield them when all are ready."""
    engines = [Engine(model, variables or {}, one) for one in settings]
    try:
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.close()
