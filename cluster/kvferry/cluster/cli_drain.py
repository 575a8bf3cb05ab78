"""`kvferry drain`: options, progress, and what is printed where."""

import contextlib
import json
import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from kvferry.cluster.cli_options import (
    AsJson,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
    credentials_of,
)
from kvferry.cluster.cli_status import Address, front_of
from kvferry.cluster.cli_up import Name, RayAddress
from kvferry.cluster.config_checks import require_ray_address
from kvferry.cluster.naming import DEFAULT_SERVICE, require_service_name
from kvferry.cluster.ports import CoordinatorPort
from kvferry.cluster.progress import Progress, stderr_progress
from kvferry.coordinator.leases import require_ttl
from kvferry.proto.credentials import DEFAULT_SERVER_NAME
from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.errors import DeadlineError, KvferryError, NotFoundError, RestoringError
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import expect

TIMEOUT_S = 10.0
POLL_S = 0.2
GRACE_S = 30.0
"""What is drained goes at the deadline, or as soon afterwards as its coordinator answers again."""

LEAST_S = 1.0
"""A deadline must lie ahead."""

EXAMPLES = """
Examples:

kvferry drain store-10.0.0.7-1a2b3c4d                 as `kvferry status` names it

kvferry drain decode-1 --deadline 20 --json           gone in 20 seconds at the latest

kvferry drain decode-1 --address 10.0.0.7:7400        through any node or the coordinator
"""

Instance = Annotated[str, typer.Argument(help="The instance, as `kvferry status` names it.")]
Deadline = Annotated[
    float, typer.Option(help="Seconds after which it goes, whatever still runs or moves there.")
]


def drain(
    instance: Instance,
    *,
    deadline: Deadline = 60.0,
    address: Address = None,
    name: Name = DEFAULT_SERVICE,
    ray_address: RayAddress = "auto",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_name: TlsName = DEFAULT_SERVER_NAME,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Empty an instance before it goes: nothing new, and what only it holds moves to peers."""
    require_service_name(name)
    require_ray_address(ray_address)
    require_ttl("--deadline", deadline)
    credentials = credentials_of(tls_cert, tls_key, tls_ca, tls_name, token_file)
    # It loads gRPC, which the command line starts without.
    from kvferry.cluster.coordinator_client import CoordinatorClient

    client = CoordinatorClient(address or front_of(name, ray_address), credentials)
    with contextlib.closing(client):
        command = Drain(instance_id=InstanceId(instance), deadline_s=deadline)
        over = until_over(client, command, stderr_progress())
    print(json.dumps(to_json(over)) if as_json else to_text(over))


def until_over(coordinator: CoordinatorPort, command: Drain, progress: Progress) -> Drained:
    """Begin a drain and return how it ended; what changes on the way goes to `progress`.

    A coordinator that is restarted meanwhile is asked until it knows the instance, and begins anew
    with the time that is left.

    Raises:
        DeadlineError: it has not ended long after its deadline; says what was heard last.
        KvferryError: it was refused.
    """
    deadline_s, tell = time.monotonic() + command.deadline_s, _Changes(progress)
    told = _begin(coordinator, command, deadline_s, tell)
    # Only the life that was there at the beginning is meant.
    command = replace(command, incarnation=told.incarnation)
    tell(_how_far(told))
    while not told.is_over:
        left_s = deadline_s - time.monotonic()
        if left_s < -GRACE_S:
            raise DeadlineError(
                f"the drain of {command.instance_id} does not end; heard last: {tell.last}",
                given=f"{command.deadline_s + GRACE_S:g} s",
            )
        time.sleep(POLL_S)
        try:
            again = replace(command, deadline_s=max(left_s, LEAST_S))
            told = expect(coordinator.call(again, timeout_s=TIMEOUT_S), Drained)
            tell(_how_far(told))
        except NotFoundError:
            tell(f"the coordinator does not know {command.instance_id}; it may be coming back")
        except KvferryError as error:
            if not error.retryable:
                raise
            tell(f"asking again: {error}")
    return told


class _Changes:
    """Tells a line unless it is the `last` one again."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.last = ""

    def __call__(self, line: str) -> None:
        if line != self.last:
            self._progress(line)
        self.last = line


def _begin(coordinator: CoordinatorPort, command: Drain, end_s: float, tell: Progress) -> Drained:
    """Begin a drain; who is coming back is waited for until `end_s`.

    Raises:
        RestoringError: it was still coming back then.
        KvferryError: it was refused.
    """
    while True:
        left_s = end_s - time.monotonic()
        try:
            now = replace(command, deadline_s=max(left_s, LEAST_S))
            return expect(coordinator.call(now, timeout_s=TIMEOUT_S), Drained)
        except RestoringError as error:
            if left_s < 0:
                raise
            tell(f"waiting: {error}")
        time.sleep(POLL_S)


def _how_far(told: Drained) -> str:
    return (
        f"{_num_moved(told)} blocks moved, {told.num_waiting} waiting, "
        f"{told.num_requests} requests running"
    )


def to_json(over: Drained) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "instance": over.instance_id,
        "incarnation": over.incarnation,
        "seconds": over.seconds,
        "cached_blocks": over.num_cached_blocks,
        "moved_blocks": _num_moved(over),
        "moved_bytes": sum(one.num_bytes for one in over.moved),
        "moved": [
            {"instance": one.instance_id, "blocks": one.num_blocks, "bytes": one.num_bytes}
            for one in over.moved
        ],
        "elsewhere_blocks": over.num_elsewhere,
        "dropped_blocks": over.num_dropped,
        "ended_requests": over.num_requests,
    }


def to_text(over: Drained) -> str:
    """Return what is printed for people."""
    moved = [
        f"  {one.num_blocks} blocks ({one.num_bytes} bytes) to {one.instance_id}"
        for one in over.moved
    ]
    num_bytes = sum(one.num_bytes for one in over.moved)
    return "\n".join(
        [
            f"{over.instance_id} is drained, in {over.seconds:.1f} s",
            f"{_num_moved(over)} blocks ({num_bytes} bytes) moved",
            *moved,
            f"{over.num_elsewhere} blocks were held by a peer, too",
            f"{over.num_dropped} blocks dropped, {over.num_requests} requests cut off",
        ]
    )


def _num_moved(told: Drained) -> int:
    return sum(one.num_blocks for one in told.moved)
