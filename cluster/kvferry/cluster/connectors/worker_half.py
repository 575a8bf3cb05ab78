"""The half of a connector that runs in each of the engine's worker processes."""

from kvferry.cluster.connectors.engine_store import EngineStore
from kvferry.cluster.connectors.loader import Loader
from kvferry.cluster.connectors.orders import StepOrders
from kvferry.cluster.connectors.rank_link import RankLink
from kvferry.cluster.connectors.saver import Saver

# How long a step in which nothing is computed may wait for a transfer, instead of spinning.
IDLE_WAIT_S = 0.02


class WorkerHalf:
    """Carries out the orders of each step; called by the engine's thread, never at once.

    Per step: `begin` before anything is computed, `start_loads` and `end` after it, then `finished`
    and `failed_blocks`.

    Args:
        link: this rank.
        store: where it saves to, and what keeps in place what is loaded.
        load_timeout_s: time for one load.
    """

    def __init__(self, link: RankLink, store: EngineStore, *, load_timeout_s: float) -> None:
        self.link = link
        self._saver = Saver(link, store)
        self._loader = Loader(link, store, load_timeout_s)
        self._held: set[str] = set()
        self._failed_ids: set[int] = set()

    def begin(self, orders: StepOrders) -> None:
        """Return when the step may write into its blocks. Repeating is fine."""
        if orders.is_reset:
            self._saver.reset()
        if orders.overwritten:
            self._saver.withdraw(orders.overwritten)

    def start_loads(self, orders: StepOrders) -> None:
        """Begin to fill blocks; those of requests that nobody waits for end early."""
        self._loader.cancel(orders.cancelled)
        if orders.loads:
            self._loader.submit(orders.loads)

    def end(self, orders: StepOrders) -> None:
        """Begin to save what the step has completed."""
        self._held |= orders.held
        if orders.saves and orders.engine is not None and orders.store_address is not None:
            self._saver.submit(orders.saves, orders.engine, orders.store_address)

    def finished(self, orders: StepOrders) -> tuple[set[str], set[str]]:
        """Return the held requests whose blocks are read, and those whose load has ended.

        Each once. A step in which nothing is computed waits a little for one.
        """
        wait_s = IDLE_WAIT_S if orders.is_idle else 0.0
        self._saver.give_up_late()
        if wait_s and self._held:
            self._saver.wait_read(self._held, wait_s)
        read = {request_id for request_id in self._held if not self._saver.reads(request_id)}
        self._held -= read
        ended = self._loader.take_ended(wait_s=0.0 if read else wait_s)
        for one in ended:
            self._failed_ids |= one.failed_ids
        return read, {one.request_id for one in ended}

    def failed_blocks(self) -> set[int]:
        """Return the engine's blocks that ended loads left without their content, each once."""
        failed, self._failed_ids = self._failed_ids, set()
        return failed

    def counts(self) -> dict[str, int]:
        """Return what was moved so far, in hash blocks."""
        return {
            "saved_blocks": self._saver.num_saved_blocks,
            "failed_save_blocks": self._saver.num_failed_blocks,
            "loaded_blocks": self._loader.num_loaded_blocks,
            "failed_loads": self._loader.num_failed_loads,
        }

    def stop(self) -> None:
        """End everything under way and stop serving."""
        self._loader.stop()
        self._saver.stop()
        self.link.stop()
