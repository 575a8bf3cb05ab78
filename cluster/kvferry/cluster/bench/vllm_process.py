"""The other interpreter, in which vLLM does the same operations: started, asked, ended."""

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from kvferry.proto.errors import ConfigError, DeadlineError, KvferryError, UnavailableError

START_TIMEOUT_S = 180.0
"""Importing vLLM takes long on a slow disk."""

CALL_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 10.0
_SCRIPT = Path(__file__).with_name("vllm_peer.py")

Call = Literal["time_cycle", "measure_memory"]


class VllmProcess:
    """One running peer; see `running_vllm`."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.version: str = self._take(START_TIMEOUT_S)["vllm"]

    def ask(self, call: Call, num_blocks: int) -> dict[str, float]:
        """Return the figures of one call of `PoolOperations`.

        Raises:
            UnavailableError: the process has ended; with the last line it logged.
            DeadlineError: no answer in time.
        """
        assert self._process.stdin is not None
        try:
            print(
                json.dumps({"call": call, "num_blocks": num_blocks}),
                file=self._process.stdin,
                flush=True,
            )
        except BrokenPipeError:
            raise self._ended() from None
        return self._take(CALL_TIMEOUT_S)

    def _take(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError("vLLM did not answer", given=f"{timeout_s:g} s") from None
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> KvferryError:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return UnavailableError("vLLM's process has ended", given=lines[-1] if lines else "no log")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


@contextmanager
def running_vllm(python: str) -> Iterator[VllmProcess]:
    """Yield a process of the interpreter `python` that has imported vLLM; end it afterwards.

    Raises:
        ConfigError: no such interpreter, or vLLM cannot be imported there.
        DeadlineError: not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        log = Path(folder) / "vllm.log"
        with log.open("w") as stderr, _started(python, stderr) as process:
            try:
                try:
                    peer = VllmProcess(process, log)
                except UnavailableError as error:
                    raise ConfigError(
                        "--vllm-python names an interpreter in which vLLM does not load",
                        given={"python": python, "error": error.given},
                        allowed="an interpreter that has vLLM 0.32",
                    ) from None
                yield peer
            finally:
                _stop(process)


def _started(python: str, stderr: Any) -> "subprocess.Popen[str]":
    # What is on our path is not meant for the other interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        return subprocess.Popen(
            [python, str(_SCRIPT)],
            env=environment | {"VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    except OSError as error:
        raise ConfigError(
            "--vllm-python cannot be run", given=python, allowed=f"a Python ({error.strerror})"
        ) from None


def _stop(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()  # it answers until its stdin ends
        process.wait(_STOP_TIMEOUT_S)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
