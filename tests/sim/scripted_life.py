"""A member of a scripted simulation: what it pulls with, and what it tells of its requests."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvferry.cluster.serving.requests import Finished
from kvferry.cluster.serving.sequence import Run
from kvferry.cluster.sim.blocking import Event
from kvferry.cluster.sim.fetching import FetchClient, Served
from kvferry.cluster.sim.instances import Instance
from kvferry.cluster.sim.members import Member
from kvferry.cluster.sim.network import Network
from kvferry.proto.errors import InstanceDiedError
from kvferry.proto.ids import RequestId
from kvferry.worker.destination import Destination
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.frames import Frame
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import FetchAsk

NEWS_S = 0.1


class ScriptedFetch(FetchClient):
    """Calls `before_fetch`, and `at_frame` with the number of each frame, before it counts.

    `is_deaf`: what is pulled goes on though nobody wants it any more.
    """

    def __init__(self, network: Network, served: Mapping[str, Served]) -> None:
        super().__init__(network, served, frame_bytes=64, shared=0.0)
        self.at_frame: Callable[[int], None] = lambda _: None
        self.before_fetch: Callable[[], None] = lambda: None
        self.is_deaf = False
        self.num_fetches = 0
        self.num_frames = 0

    def fetch(
        self,
        peer: Peer,
        ask: FetchAsk,
        destination: Destination,
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        self.num_fetches += 1
        self.before_fetch()
        if self.is_deaf:
            terms = replace(terms, cancel=Event(self._network.world))  # type: ignore[arg-type]
        super().fetch(peer, ask, destination, session, terms)

    def _decoded(self, message: object) -> Frame:
        self.num_frames += 1
        self.at_frame(self.num_frames)
        return super()._decoded(message)


class Life:
    """A member in one life, what it pulls with, and what it has told of its requests."""

    def __init__(self, member: Member, fetch: ScriptedFetch) -> None:
        self.member = member
        self.fetch = fetch
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.finished: dict[str, Finished] = {}
        self.listens = True

    @property
    def instance(self) -> Instance:
        assert isinstance(self.member, Instance)
        return self.member

    @property
    def engine(self) -> Any:
        return self.instance.engine

    def before_run(self, do: Callable[[Run], None]) -> None:
        """Call `do` with each run of the model before it is computed."""
        model = self.instance.model
        forward = model.forward

        def watched(runs: tuple[Run, ...]) -> dict[RequestId, int]:
            for run in runs:
                do(run)
            return forward(runs)

        model.forward = watched  # type: ignore[method-assign]

    def listen(self) -> None:
        """Take the news of the engine while nobody else does; in a task of its process."""
        seq = 0
        while self.listens:
            try:
                batch = self.engine.outputs(seq, NEWS_S)
            except InstanceDiedError:
                return
            seq = batch.next_seq
            for output in batch.outputs:
                known = self.tokens.get(output.request_id, ())
                self.tokens[output.request_id] = known + output.token_ids
                if output.finished is not None:
                    self.finished[output.request_id] = output.finished
