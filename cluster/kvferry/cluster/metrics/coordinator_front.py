"""The coordinator's metrics, and the list of all others, over HTTP."""

from collections.abc import Callable

from kvferry.cluster.metrics.coordinator_metrics import coordinator_metrics
from kvferry.cluster.metrics.metrics_server import MetricsServer, metrics_page
from kvferry.cluster.metrics.targets import targets_page
from kvferry.proto.messages import Command, Describe, Description, Reply, expect


def coordinator_front(
    call: Callable[[Command], Reply], *, bind: str, port: int, insecure: bool
) -> MetricsServer:
    """Serve `/metrics` and `/targets` of the coordinator that answers `call`.

    Raises:
        InsecureBindError, PortTakenError, ConfigError: as `MetricsServer`.
        KvferryError: as `call` raises; it is asked once at the start.
    """

    def describe() -> Description:
        return expect(call(Describe()), Description)

    pages = {
        "/metrics": metrics_page(lambda: coordinator_metrics(describe())),
        "/targets": targets_page(describe),
    }
    return MetricsServer(pages, bind=bind, port=port, insecure=insecure)
