"""A coordinator with its control front, and workers, for tests of the public client."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.builders import make_info

from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.credentials import Credentials
from kvferry.proto.hashing import make_scheme
from kvferry.proto.identity import Identity
from kvferry.proto.ids import Epoch, Incarnation, InstanceId
from kvferry.proto.messages import RegisterInstance, Role
from kvferry.worker.actor import StoreConfig, WorkerActor

BLOCK_TOKENS = 4


@dataclass
class ClientService:
    coordinator: CoordinatorActor
    address: str
    identity: Identity
    credentials: Credentials | None = None
    workers: dict[str, WorkerActor] = field(default_factory=dict)

    def add(self, name: str, role: Role, *, num_blocks: int) -> None:
        worker = WorkerActor()
        self.workers[name] = worker
        config = StoreConfig(
            instance_id=InstanceId(name),
            incarnation=Incarnation(1),
            identity=self.identity,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            credentials=self.credentials,
        )
        started = worker.start(config)
        info = make_info(
            name,
            role=role,
            identity=self.identity,
            block_tokens=BLOCK_TOKENS,
            num_blocks=num_blocks,
            rank_addresses=(started.address,),
            max_model_len=0 if role == "store" else 64,
            rank_pids=(started.pid,),
        )
        self.coordinator.call(RegisterInstance(call_id=f"register {name}", info=info))
        if role == "store":
            worker.set_coordinator(self.coordinator.call, Epoch(1))


@contextlib.contextmanager
def running_client_service(
    identity: Identity, *, num_blocks: int, credentials: Credentials | None = None
) -> Iterator[ClientService]:
    """A service of one store; invariants are checked at every call."""
    scheme = make_scheme(hash_block_tokens=BLOCK_TOKENS)
    # Its workers have no heartbeat.
    coordinator = CoordinatorActor(
        scheme=scheme,
        registry=ProcessRegistry(),
        suspect_after_s=600.0,
        dead_after_s=1200.0,
        check_invariants=True,
    )
    coordinator.start()
    front = ControlServer(
        coordinator.call, bind="127.0.0.1", port=0, insecure=False, credentials=credentials
    )
    running = ClientService(coordinator, front.address, identity, credentials)
    running.add("store-0", "store", num_blocks=num_blocks)
    yield running
    front.stop()
    for worker in running.workers.values():
        worker.stop()
    coordinator.stop()
