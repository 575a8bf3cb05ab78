"""A kvferry service small enough to try the client on: one coordinator and one store, no Ray.

    python examples/store_service.py --model path/to/a/model --port 7000

Prints the address of its control front once a client can use it, and serves until interrupted.
"""

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version

from kvferry.cluster.store_watch import StoreWatch
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.errors import KvferryError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import InstanceInfo, RegisterInstance
from kvferry.worker.actor import StoreConfig, WorkerActor
from kvferry.worker.model.loading import inspect_model


@dataclass(frozen=True)
class Member:
    """The store as its heartbeat sees it."""

    store: WorkerActor
    info: InstanceInfo
    coordinator: CoordinatorActor

    def beat(self) -> None:
        """Tell the coordinator that the store lives."""
        self.store.beat(self.coordinator.call)

    def come_back(self) -> None:
        """Register again with all that the store holds."""
        self.store.come_back(self.coordinator.call, self.info)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="One coordinator and one store, without Ray.")
    parser.add_argument("--model", required=True, help="model folder or hub id")
    parser.add_argument("--port", type=int, default=0, help="of the control front; 0: any free one")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens per block")
    parser.add_argument("--num-blocks", type=int, default=1024, help="blocks of the store")
    return parser.parse_args()


def start(args: argparse.Namespace, coordinator: CoordinatorActor, store: WorkerActor) -> Member:
    """Start the store, register it, make it take what clients send, and return it.

    Raises:
        KvferryError: the model or an option is not usable.
    """
    config = StoreConfig(
        instance_id=InstanceId("store-0"),
        incarnation=Incarnation(time.time_ns()),
        identity=inspect_model(args.model).identity,
        num_blocks=args.num_blocks,
        block_tokens=args.block_tokens,
    )
    epoch = coordinator.start()
    started = store.start(config)
    info = InstanceInfo(
        instance_id=config.instance_id,
        role="store",
        incarnation=config.incarnation,
        identity=config.identity,
        scheme=make_scheme(hash_block_tokens=args.block_tokens),
        layout=Layout(block_tokens=args.block_tokens),
        num_blocks=args.num_blocks,
        rank_addresses=(started.address,),
        max_model_len=0,
        rank_pids=(os.getpid(),),
        version=version("kvferry"),
    )
    coordinator.call(RegisterInstance(call_id="register store-0", info=info))
    store.set_coordinator(coordinator.call, epoch)
    return Member(store, info, coordinator)


def main() -> int:
    """Serve until interrupted; return the exit code."""
    args = parse_arguments()
    # Ctrl-C and `kill` both end the wait below, so that the servers are stopped either way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    scheme = make_scheme(hash_block_tokens=args.block_tokens)
    coordinator, store = CoordinatorActor(scheme=scheme, registry=ProcessRegistry()), WorkerActor()
    front: ControlServer | None = None
    watch: StoreWatch | None = None
    try:
        member = start(args, coordinator, store)
        # A member that is not heard is forgotten.
        watch = StoreWatch(lambda: [member])
        front = ControlServer(coordinator.call, bind="127.0.0.1", port=args.port, insecure=False)
        print(f"control front: {front.address}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr)
    except KvferryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if front is not None:
            front.stop()
        if watch is not None:
            watch.stop()
        store.stop()
        coordinator.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
