"""vLLM's connector to kvferry, named in vLLM's `--kv-transfer-config` (docs/vllm.md).

Made for vLLM 0.20 and later. Everything that decides is in the two halves; here vLLM's calls become
theirs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvferry.cluster.connectors.engine_store import EngineStore
from kvferry.cluster.connectors.orders import StepOrders
from kvferry.cluster.connectors.paged_tensors import PagedTensors, of_accelerator, of_cpu
from kvferry.cluster.connectors.rank_link import RankLink
from kvferry.cluster.connectors.scheduler_half import Scheduled, SchedulerHalf
from kvferry.cluster.connectors.service_link import ServiceLink
from kvferry.cluster.connectors.vllm_facts import FerrySettings, facts_of
from kvferry.cluster.connectors.vllm_requests import keys_of
from kvferry.cluster.connectors.vllm_stats import FerryPromMetrics, FerryStats
from kvferry.cluster.connectors.worker_half import WorkerHalf
from kvferry.proto.errors import ConfigError
from kvferry.proto.step_messages import Source


@dataclass
class FerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, as vLLM carries them."""

    orders: StepOrders


@dataclass
class FerryHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where one rank can be reached."""

    rank: int
    address: str


class FerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of the connector, in vLLM's scheduler or in one of its workers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = FerrySettings.read(extra)
        self._store = EngineStore(
            self._settings.node_address(),
            timeout_s=self._settings.timeout_s,
            credentials=self._settings.credentials(),
        )
        self._facts = facts_of(
            vllm_config, kv_cache_config, self._store.scheme, self._settings, vllm_version
        )
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._ended: StepOrders | None = None
        self._stats = FerryStats()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler()

    # --- in the scheduler ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, None to be asked again, and that it is async."""
        found = self._scheduling.match(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order a load into the blocks."""
        (block_ids,) = blocks.get_block_ids()
        self._scheduling.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> FerryMetadata:
        """Return what the workers are to do with this step."""
        orders = self._scheduling.step(
            _scheduled(scheduler_output),
            is_idle=not scheduler_output.total_num_scheduled_tokens,
        )
        return FerryMetadata(orders=orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of loads that ended."""
        self._scheduling.loaded(
            sorted(connector_output.finished_recving or ()),
            frozenset(connector_output.invalid_block_ids or ()),
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save the rest, and say whether the blocks must stay for it."""
        return self._scheduling.finished(request, request.num_computed_tokens, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, of the one group there is."""
        return self.request_finished(request, block_ids[0])

    def set_xfer_handshake_metadata(self, metadata: dict[Any, FerryHandshake]) -> None:
        """Take note of where the engine's ranks are."""
        by_rank = {one.rank: one.address for one in metadata.values()}
        num_ranks = self._facts.layout.num_ranks
        if sorted(by_rank) != list(range(num_ranks)):
            raise ConfigError(
                "not all ranks of the engine told where they are",
                given=sorted(by_rank),
                allowed=list(range(num_ranks)),
            )
        self._scheduling.engine = Source(
            instance_id=self._facts.instance_id,
            incarnation=self._facts.incarnation,
            layout=self._facts.layout,
            rank_addresses=tuple(by_rank[rank] for rank in range(num_ranks)),
        )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, FerryHandshake]) -> None:
        """As `set_xfer_handshake_metadata`, which newer versions call in this way."""
        self.set_xfer_handshake_metadata(metadata)

    def reset_cache(self) -> bool:
        """Make all that was saved of this identity unfindable, for every engine."""
        return self._scheduling.reset()

    def has_pending_push_work(self) -> bool:
        """Return whether a step is needed even if there are no requests: to tell of a reset."""
        return self._scheduling.is_reset_pending

    # --- in a worker -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Begin to serve this rank's blocks."""
        from vllm.distributed.parallel_state import get_world_group
        from vllm.model_executor.models.utils import extract_layer_index

        facts, identity = self._facts, self._facts.identity
        rank = get_world_group().rank_in_group % facts.layout.num_ranks
        shard = facts.layout.place(rank).head_shard
        paged_layer = of_cpu if _are_on_cpu(kv_caches) else of_accelerator
        layers = [
            paged_layer(
                kv_caches[name],
                block_tokens=facts.engine_block_tokens // facts.layout.token_shards,
                num_heads=len(facts.layout.heads(identity.num_kv_heads)[shard]),
                head_size=identity.head_size,
            )
            for name in sorted(kv_caches, key=extract_layer_index)
        ]
        link = RankLink(
            facts,
            rank,
            PagedTensors(layers),
            staging_bytes=self._settings.staging_mib << 20,
            bind=self._settings.bind,
            insecure=self._settings.insecure,
            credentials=self._settings.credentials(),
        )
        self._worker = WorkerHalf(link, self._store, load_timeout_s=self._settings.load_timeout_s)
        self._handshake = FerryHandshake(rank=rank, address=link.address)

    def get_handshake_metadata(self) -> FerryHandshake:
        """Return where this rank can be reached."""
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Let go of blocks that are about to be overwritten."""
        if isinstance(kv_connector_metadata, FerryMetadata):
            self._working.begin(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take this step's orders."""
        super().bind_connector_metadata(connector_metadata)
        # Versions differ in when they call `handle_preemptions`; nothing is computed before this.
        self._working.begin(self._orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        self._working.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are saved when all of their layers are there."""

    def wait_for_save(self) -> None:
        """Begin this step's saves."""
        self._end(self._orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks are read, and those whose loads have ended."""
        # Not all versions call `wait_for_save` in a step in which nothing is computed.
        self._end(self._orders)
        return self._working.finished(self._orders)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads left without their content."""
        return self._working.failed_blocks()

    # --- in both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Return what happened since the last call."""
        counts = self._scheduler.hit_counts() if self._scheduler is not None else {}
        if self._worker is not None:
            counts |= self._worker.counts()
        return self._stats.since(counts)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """Return statistics that came from another process."""
        return FerryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> FerryPromMetrics:
        """Return what shows them to Prometheus."""
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End everything under way."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.stop()
        self._store.close()

    @property
    def _scheduling(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _working(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    @property
    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FerryMetadata)
        return metadata.orders

    def _end(self, orders: StepOrders) -> None:
        if self._ended is not orders:
            self._ended = orders
            self._working.end(orders)

    def _make_scheduler(self) -> SchedulerHalf:
        identity = self._facts.identity
        self._store.attach(identity, self._facts.info)
        return SchedulerHalf(
            self._facts,
            ServiceLink(self._store, identity),
            keys_of=keys_of,
            store_address=lambda: self._store.store_address,
        )


def _are_on_cpu(kv_caches: dict[str, torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in kv_caches.values())


def _scheduled(output: Any) -> Iterable[Scheduled]:
    for new in output.scheduled_new_reqs:
        yield Scheduled(
            request_id=new.req_id,
            block_ids=new.block_ids[0],
            starts=True,
            num_computed=new.num_computed_tokens,
            num_tokens=output.num_scheduled_tokens[new.req_id],
        )
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        new_ids = cached.new_block_ids[index]
        yield Scheduled(
            request_id=request_id,
            block_ids=new_ids[0] if new_ids else [],
            starts=request_id in cached.resumed_req_ids,
            num_computed=cached.num_computed_tokens[index],
            num_tokens=output.num_scheduled_tokens[request_id],
        )
