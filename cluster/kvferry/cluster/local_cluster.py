"""A Ray cluster of this machine alone that outlives the command which starts it.

A process of its own keeps it (`ray_keeper`), and writes down where it is and the token it asks for.
Nothing here imports Ray, which reads that token when it is imported.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvferry.cluster import ray_environment
from kvferry.proto.errors import DeadlineError, UnavailableError

KEEPER = "kvferry.cluster.ray_keeper"
POLL_S = 0.05
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A running one: its keeper's process, `host:port` of its head, and its token if it asks."""

    pid: int
    address: str
    auth_mode: str
    token: str

    def enter_environment(self) -> None:
        """Let this process join it; before the first `import ray`."""
        ray_environment.prepare(self.address)
        os.environ["RAY_AUTH_MODE"] = self.auth_mode
        if self.token:
            os.environ["RAY_AUTH_TOKEN"] = self.token


def record(name: str) -> Path:
    """Return the file in which the keeper of a service's cluster writes it down."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvferry" / f"ray-{name}.json"


def log_file(name: str) -> Path:
    """Return the file that has what the keeper says, while it runs or after it has failed."""
    return record(name).with_suffix(".log")


def write(name: str, cluster: LocalCluster) -> None:
    """Write a cluster down, for this user only and at once whole."""
    place = record(name)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = place.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(asdict(cluster)))
    draft.replace(place)


def find(name: str) -> LocalCluster | None:
    """Return the cluster that was started for a service, if it runs."""
    try:
        cluster = LocalCluster(**json.loads(record(name).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return cluster if _keeps(cluster.pid, name) else None


def start(name: str, timeout_s: float) -> LocalCluster:
    """Start a cluster for a service.

    Raises:
        UnavailableError: it did not start; naming the log that says why.
        DeadlineError: it was not up within `timeout_s`.
    """
    ray_environment.prepare("local")
    record(name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = log_file(name)
    with log.open("wb") as output:
        # A session of its own: what ends this command's terminal does not end the cluster.
        keeper = subprocess.Popen(
            [sys.executable, "-m", KEEPER, name, str(record(name))],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    try:
        while (cluster := find(name)) is None or cluster.pid != keeper.pid:
            if keeper.poll() is not None:
                raise UnavailableError("the local Ray cluster did not start", given=str(log))
            if time.monotonic() > deadline:
                raise DeadlineError(
                    "the local Ray cluster is not up yet",
                    given=str(log),
                    allowed=f"{timeout_s:g} s",
                )
            time.sleep(POLL_S)
    except BaseException:
        _end(keeper.pid, name)
        raise
    return cluster


def stop(name: str) -> bool:
    """End the cluster of a service, and tell whether there was one.

    Also one that whoever started it left before it was up, of which nothing is written down yet.

    Raises:
        DeadlineError: it does not end.
    """
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    keepers = [pid for pid in pids if _keeps(pid, name)]
    for pid in keepers:
        _end(pid, name)
    return bool(keepers)


def _end(pid: int, name: str) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        # Once: while Ray takes its cluster down, it leaves nobody's handler in place.
        os.kill(pid, signal.SIGTERM)
    while _keeps(pid, name):
        if time.monotonic() > deadline:
            raise DeadlineError("the local Ray cluster does not end", given={"pid": pid})
        time.sleep(POLL_S)


def _keeps(pid: int, name: str) -> bool:
    """Tell whether a process keeps a service's cluster, and is not another of its number."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return KEEPER.encode() in words and str(record(name)).encode() in words
