"""One rank of an engine instance: a share of the KV memory, its transfer server, and the model.

All ranks of an instance do the same passes, over their own tokens. Rank 0 tells the others what to
do (`rank_actor.py`); nothing here knows of requests or of the coordinator.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from prometheus_client import Metric

from kvferry.cluster.metrics.metrics_server import MetricsServer, metrics_page
from kvferry.cluster.metrics.worker_metrics import worker_metrics
from kvferry.cluster.naming import outside_ray
from kvferry.cluster.serving.limits import Policy
from kvferry.cluster.serving.pool_size import KvSize, LengthLimit, PoolPlan, plan_pool
from kvferry.cluster.serving.pulse import HANGS_AFTER_S
from kvferry.coordinator.sizing import kv_cache_bytes
from kvferry.proto.bind import reachable_address
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import BlockHash, BlockId, GroupId, Incarnation, InstanceId, LeaseId
from kvferry.proto.layout import Layout
from kvferry.proto.layout_fit import require_layout_fits
from kvferry.proto.messages import Role
from kvferry.proto.scheme import Algorithm, KeyFormat
from kvferry.proto.step_messages import Source
from kvferry.worker.device import Device, open_device
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.inventory import InventoryPart
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.model.computable import require_computable
from kvferry.worker.model.loading import LoadedModel, load_model
from kvferry.worker.model.profiling import non_kv_peak_bytes
from kvferry.worker.model.runner import ModelRunner, SequenceSlice
from kvferry.worker.model.sharded_group import MeetingPoint, RankGroup
from kvferry.worker.model.sharded_runner import ShardedRunner
from kvferry.worker.pull import PullOutcome
from kvferry.worker.service import WorkerService

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a rank is told by the launcher; sizes in tokens where nothing else is said.

    `rank` is its number in `layout`. `rank_timeout_s`: how long ranks wait for each other in a
    pass; `hangs_after_s`: how long a pass may take.
    """

    instance_id: InstanceId
    role: Role
    model: str
    dtype: str
    device: str
    layout: Layout
    rank: int = 0
    hash_block_tokens: int
    kv_size: KvSize
    max_model_len: LengthLimit
    token_budget: int
    max_running: int
    policy: Policy
    algorithm: Algorithm
    key_format: KeyFormat
    bind: str
    insecure: bool
    serves_metrics: bool = False
    credentials: Credentials | None = None
    reflection: bool = False
    rank_timeout_s: float
    hangs_after_s: float = HANGS_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOrder:
    """What all ranks of an instance must have alike; `meeting_address` where they meet."""

    num_blocks: int
    incarnation: Incarnation
    meeting_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOpened:
    """Where peers reach a rank, its process, and where its metrics are, if it serves them.

    `node_id` is Ray's id of its node, "" outside Ray.
    """

    address: str
    pid: int
    node_id: str
    metrics_address: str | None


class Rank:
    """Construct, `load`, `open`; then passes and transfers. Construction does nothing.

    Passes come one at a time; everything else from any thread.

    Args:
        settings: which rank of what.
        node_host: returns the address by which other machines reach this one.
        node_id: returns Ray's id of this node.
    """

    def __init__(
        self,
        settings: RankSettings,
        node_host: Callable[[], str],
        node_id: Callable[[], str] = outside_ray,
    ) -> None:
        self._settings = settings
        self._node_host = node_host
        self._node_id = node_id
        self._device: Device | None = None
        self._loaded: LoadedModel | None = None
        self._worker: WorkerService | None = None
        self._runner: ModelRunner | ShardedRunner | None = None
        self._group: RankGroup | None = None
        self._metrics: MetricsServer | None = None
        self._cancels: dict[str, threading.Event] = {}
        self._stopped = threading.Event()

    def load(self) -> PoolPlan:
        """Load the model and return the pool that this rank's memory allows.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: a layout that cannot be computed with, or the memory is too small.
        """
        settings = self._settings
        logging.basicConfig(stream=sys.stderr, level=logging.INFO)
        require_computable(settings.layout, who=f"instance {settings.instance_id}")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        loaded = load_model(settings.model, dtype=settings.dtype)
        require_layout_fits(
            settings.layout,
            loaded.identity,
            hash_block_tokens=settings.hash_block_tokens,
            who=f"instance {settings.instance_id}",
        )
        self._device = open_device(settings.device)
        torch.nn.Module.to(loaded.model, self._device.name)
        self._loaded = loaded
        return _plan_pool(settings, loaded, self._device)

    def meeting_point(self) -> MeetingPoint:
        """Return a place where the ranks of the instance can meet; kept by the caller (rank 0).

        Raises:
            ConfigError: the host of `bind` is not an address of this machine.
        """
        return MeetingPoint(self._own_host())

    def open(self, order: OpenOrder) -> RankOpened:
        """Allocate the memory, serve it to peers, and meet the other ranks.

        Raises:
            ConfigError: sizes that do not fit, several ranks on another device than the CPU, or
                `load` was not called.
            InsecureBindError, PortTakenError: the servers cannot listen.
            UnavailableError: not all ranks came in time.
        """
        settings = self._settings
        if self._loaded is None or self._device is None:
            raise ConfigError("a rank is opened before its model is loaded", allowed="load() first")
        memory = KvMemory(
            self._device,
            self._loaded.identity,
            num_blocks=order.num_blocks,
            layout=settings.layout,
            rank=settings.rank,
        )
        self._worker = WorkerService(
            incarnation=order.incarnation, memory=memory, credentials=settings.credentials
        )
        address = self._worker.serve(
            bind=settings.bind,
            port=0,
            insecure=settings.insecure,
            reflection=settings.reflection,
        )
        self._runner = self._make_runner(self._loaded, memory, order.meeting_address)
        return RankOpened(
            address=reachable_address(address, self._node_host),
            pid=os.getpid(),
            node_id=self._node_id(),
            metrics_address=self._serve_metrics() if settings.serves_metrics else None,
        )

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Compute a pass together with the other ranks; rank 0 gets the logits.

        Raises:
            BadInputError, TokenError, PromptTooLongError: as `ModelRunner.forward`.
            UnavailableError: another rank stopped.
            ConfigError: `open` was not called.
        """
        if self._runner is None:
            raise ConfigError("a rank computes before it is open", allowed="open() first")
        return self._runner.forward(batch)

    def written(self, group_id: GroupId, pairs: Sequence[tuple[BlockHash, BlockId]]) -> None:
        """See `WorkerService.written`."""
        self.worker.written(group_id, pairs)

    def reused(self, block_ids: Sequence[BlockId]) -> None:
        """See `WorkerService.reused`."""
        self.worker.reused(block_ids)

    def inventory(self, max_blocks: int) -> Iterator[InventoryPart]:
        """See `WorkerService.inventory`."""
        return self.worker.inventory(max_blocks)

    def pull(
        self,
        pull_id: str,
        source: Source,
        lease_id: LeaseId,
        loads: Sequence[GroupLoad],
        timeout_s: float,
    ) -> PullOutcome:
        """Pull this rank's part, until it is done or `cancel_pull` is called with this id.

        Ids are not used twice.

        Raises:
            BadInputError: as `WorkerService.pull`.
            ConfigError: `open` was not called.
        """
        cancel = self._cancels[pull_id] = threading.Event()
        try:
            return self.worker.pull(
                source=source, lease_id=lease_id, loads=loads, timeout_s=timeout_s, cancel=cancel
            )
        finally:
            del self._cancels[pull_id]

    def cancel_pull(self, pull_id: str) -> None:
        """Stop a pull; it ends with an outcome that says so. One that has ended is no error."""
        cancel = self._cancels.get(pull_id)
        if cancel is not None:
            cancel.set()

    def ping(self) -> None:
        """Do nothing: whoever asks wants to know whether this process still answers."""

    def wait_until_stopped(self) -> None:
        """Return when `stop` is called: whoever waits here sees at once how this process ends."""
        self._stopped.wait()

    def stop(self) -> None:
        """End servers and group; may be called at any time and more than once."""
        if self._worker is not None:
            self._worker.stop()
        if self._group is not None:
            self._group.close()
        if self._metrics is not None:
            self._metrics.stop()
        self._stopped.set()

    @property
    def worker(self) -> WorkerService:
        """The bytes of this rank.

        Raises:
            ConfigError: `open` was not called.
        """
        if self._worker is None:
            raise ConfigError("a rank is used before it is open", allowed="open() first")
        return self._worker

    @property
    def loaded(self) -> LoadedModel:
        """The model.

        Raises:
            ConfigError: `load` was not called.
        """
        if self._loaded is None:
            raise ConfigError("a rank is used before its model is loaded", allowed="load() first")
        return self._loaded

    def _serve_metrics(self) -> str:
        def read() -> Iterator[Metric]:
            num_resident_blocks = self.worker.residency.num_blocks()
            return worker_metrics(self.worker.stats(), num_resident_blocks=num_resident_blocks)

        settings = self._settings
        self._metrics = MetricsServer(
            {"/metrics": metrics_page(read)}, bind=settings.bind, insecure=settings.insecure
        )
        return reachable_address(self._metrics.address, self._node_host)

    def _make_runner(
        self, loaded: LoadedModel, memory: KvMemory, meeting_address: str
    ) -> ModelRunner | ShardedRunner:
        settings = self._settings
        if settings.layout.num_ranks == 1:
            return ModelRunner(loaded, memory.layers, settings.layout.block_tokens)
        self._group = RankGroup(
            settings.instance_id,
            settings.layout,
            rank=settings.rank,
            meeting_address=meeting_address,
            host=self._own_host(),
            timeout_s=settings.rank_timeout_s,
        )
        return ShardedRunner(loaded, memory.layers, self._group)

    def _own_host(self) -> str:
        """Return where this rank listens for the other ones: the host of `bind`, never all."""
        address = reachable_address(f"{self._settings.bind}:0", self._node_host)
        return address.rpartition(":")[0].strip("[]")


def _plan_pool(settings: RankSettings, loaded: LoadedModel, device: Device) -> PoolPlan:
    """Plan the rank's pool; only a fraction of the memory needs measuring."""
    kv_bytes = settings.kv_size.kv_bytes or 0
    if settings.kv_size.memory_fraction is not None:
        total_bytes = device.total_bytes()
        peak_bytes = non_kv_peak_bytes(
            loaded,
            device,
            block_tokens=settings.layout.block_tokens,
            token_budget=settings.token_budget,
            max_running=settings.max_running,
        )
        log.info("%d of %d bytes are taken beside the KV cache", peak_bytes, total_bytes)
        kv_bytes = kv_cache_bytes(total_bytes, settings.kv_size.memory_fraction, peak_bytes)
    return plan_pool(
        loaded.identity,
        who=settings.instance_id,
        layout=settings.layout,
        token_budget=settings.token_budget,
        model_len=loaded.max_model_len,
        max_model_len=settings.max_model_len,
        num_blocks=settings.kv_size.num_blocks,
        kv_bytes=kv_bytes,
    )
