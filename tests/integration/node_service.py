"""A coordinator with its front, and the settings of a node before it, for tests of nodes."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.builders import make_identity

from kvferry.cluster.engine_info import EngineInfo
from kvferry.cluster.node_config import NodeConfig
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.credentials import Credentials
from kvferry.proto.hashing import make_scheme
from kvferry.proto.layout import Layout

BLOCK_TOKENS = 4
IDENTITIES = [make_identity(num_layers=2, num_kv_heads=3, weight_version=f"v{i}") for i in range(3)]
BLOCK_BYTES = IDENTITIES[0].block_bytes(BLOCK_TOKENS)
NUM_BLOCKS = 50
NODE = "store-127.0.0.1-"
ENGINE = EngineInfo(
    engine_id="a", layout=Layout(block_tokens=32, kind="vllm", tp=2), version="vllm 0.32.0"
)
OTHER_ENGINE = EngineInfo(engine_id="b", layout=Layout(block_tokens=64), version="vllm 0.30.0")


@contextmanager
def serving(credentials: Credentials | None) -> Iterator[CoordinatorActor]:
    scheme = make_scheme(hash_block_tokens=BLOCK_TOKENS)
    actor = CoordinatorActor(scheme=scheme, registry=ProcessRegistry(), check_invariants=True)
    actor.start(
        lambda call: ControlServer(
            call, bind="127.0.0.1", port=0, insecure=False, credentials=credentials
        )
    )
    yield actor
    actor.stop()


def node_config(coordinator: CoordinatorActor) -> NodeConfig:
    """Room for two identities, and half a block more than `NUM_BLOCKS` blocks of each."""
    return NodeConfig(
        host="127.0.0.1",
        coordinator=str(coordinator.front_address()),
        store_bytes=NUM_BLOCKS * BLOCK_BYTES + BLOCK_BYTES // 2,
        max_models=2,
        port=0,
    )
