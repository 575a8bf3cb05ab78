"""The connector's counts, as vLLM gathers and shows them."""

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

DESCRIPTIONS = {
    "external_query_tokens": "Tokens that the engine did not hold itself, at first admission.",
    "external_hit_tokens": "Of those, tokens that kvferry promised to load.",
    "saved_blocks": "Hash blocks that a store took.",
    "failed_save_blocks": "Hash blocks that were not saved.",
    "loaded_blocks": "Hash blocks that came into the engine.",
    "failed_loads": "Loads that brought less than was promised.",
    "failed_lookups": "Questions that the service did not answer.",
}


class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of an interval, by name; those of several processes add up."""

    data: dict[str, int]

    def since(self, totals: dict[str, int]) -> "FerryStats | None":
        """Return what the totals have grown by since the last call, None if by nothing."""
        grown = {
            name: total - self.data.get(name, 0)
            for name, total in totals.items()
            if total != self.data.get(name, 0)
        }
        self.data.update(totals)
        return FerryStats(data=grown) if grown else None

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "FerryStats":
        """Return the sum of both."""
        names = self.data.keys() | other.data.keys()
        return FerryStats(
            data={name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        )

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, for vLLM's log."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Return whether nothing happened."""
        return not self.data


class FerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter `vllm:kvferry_<name>` per count and engine."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters: dict[int, dict[str, Any]] = {}
        for name, text in DESCRIPTIONS.items():
            metric = counter(name=f"vllm:kvferry_{name}", documentation=text, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters.setdefault(engine, {})[name] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(count)
