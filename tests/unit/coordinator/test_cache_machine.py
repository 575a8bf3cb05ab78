"""Random lives of requests over every kind of group; everything must add up after each step."""

from hashlib import sha256
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.unit.coordinator.caches import spec_of
from tests.unit.coordinator.pool_checks import check_owners, check_pool

from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.request_state import KnownContent, RequestState
from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import BlockHash, BlockId, RequestId
from kvferry.proto.specs import (
    ChunkedLocalSpec,
    CrossSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    MlaSpec,
    SinkSpec,
    SlidingWindowSpec,
)

FULL, MLA = spec_of(FullSpec), spec_of(MlaSpec)
WINDOW = spec_of(SlidingWindowSpec, window_tokens=6)
CHUNKED = spec_of(ChunkedLocalSpec, chunk_tokens=8)
ALL = spec_of(MambaSpec, mode="all", speculative_blocks=1)
ALIGN = spec_of(MambaSpec, mode="align", speculative_blocks=1)
SINK = spec_of(SinkSpec, sink_tokens=4)

# Groups and settings; each runs under both profiles unless it names one.
CACHES: list[tuple[tuple[LayerSpec, ...], dict[str, Any]]] = [
    ((FULL,), {}),
    ((FULL,), {"use_eagle": True}),
    ((MLA,), {"dcp": 2, "hash_block_tokens": 8}),
    ((WINDOW,), {}),
    ((CHUNKED,), {}),
    ((ALL,), {}),
    ((ALIGN,), {}),
    ((spec_of(MambaSpec, mode="none"),), {"enable_caching": False}),
    ((SINK,), {"profile": "0.17"}),
    ((FULL, spec_of(CrossSpec)), {"enable_caching": False}),
    ((FULL, WINDOW), {}),
    ((WINDOW, FULL), {"use_eagle": True}),
    ((FULL, CHUNKED), {}),
    ((FULL, WINDOW, spec_of(SlidingWindowSpec, window_tokens=11)), {}),
    ((FULL, ALL), {}),
    ((FULL, ALIGN), {}),
    (
        (spec_of(FullSpec, block_tokens=8), spec_of(SlidingWindowSpec, window_tokens=9)),
        {"hash_block_tokens": 2},
    ),
    (
        (spec_of(FullSpec, block_tokens=8), spec_of(MambaSpec, block_tokens=8, mode="align")),
        {"profile": "0.32"},
    ),
    ((FULL, WINDOW), {"profile": "0.32", "retention_interval": 8, "watermark": 0.1}),
    ((FULL, ALIGN), {"profile": "0.32", "retention_interval": 0}),
]
SETTINGS = [
    (groups, {**changes, "profile": profile})
    for groups, changes in CACHES
    for profile in ("0.17", "0.32")
    if changes.get("profile", profile) == profile
]
SHARED = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0]
MAX_MODEL_LEN = 40
# Prompts with a common beginning of any length, so that hits and partial hits are frequent.
prompts = st.builds(
    lambda num_shared, tail: SHARED[:num_shared] + tail,
    st.integers(0, 24),
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
)


class CacheMachine(RuleBasedStateMachine):
    """Plays a scheduler: admits with hits, grows, loads, drafts, preempts, frees, evicts."""

    groups: ClassVar[tuple[LayerSpec, ...]] = ()
    changes: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_blocks": 24, "hash_block_tokens": 4}
        self.config = CacheConfig(
            groups=self.groups, max_model_len=MAX_MODEL_LEN, **{**sizes, **self.changes}
        )
        self.manager = CacheManager(self.config)
        # Such a group does not take external tokens, and is worth a stop where a prompt ends.
        self.aligns = any(
            isinstance(spec, MambaSpec) and spec.mode == "align" for spec in self.groups
        )
        self.loads = self.config.enable_caching and not self.aligns
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.num_opened = 0

    @rule(arrivals=st.lists(prompts, max_size=2), share=st.integers(1, 4), stop=st.booleans())
    def serve(self, arrivals: list[list[int]], share: int, stop: bool) -> None:
        for tokens in arrivals:
            self.open(tokens)
        for request in list(self.waiting):
            if not self.admit(request, share, 0, stop):
                return

    @precondition(lambda self: self.waiting and self.loads)
    @rule(num_external=st.integers(1, 2))
    def load(self, num_external: int) -> None:
        self.admit(self.waiting[0], 4, num_external, stop=False)

    def open(self, tokens: list[int]) -> None:
        self.num_opened += 1
        request = RequestState(
            request_id=RequestId(f"r{self.num_opened}"),
            num_tokens=len(tokens),
            num_prompt_tokens=len(tokens),
            content=KnownContent(tokens=tokens),
        )
        self.hash(request)
        self.waiting.append(request)

    def hash(self, request: RequestState) -> None:
        assert request.content is not None
        unit, tokens = self.config.hash_block_tokens, request.content.tokens
        for end in range((len(request.hashes) + 1) * unit, len(tokens) + 1, unit):
            request.hashes.append(BlockHash(sha256(bytes(tokens[:end])).digest()))

    def admit(self, request: RequestState, share: int, num_external: int, stop: bool) -> bool:
        blocks, hit = self.manager.get_computed_blocks(request)
        assert hit < request.num_tokens
        unit = self.manager.config.scheduler_block_tokens
        external = min(num_external * unit, (request.num_tokens - hit - 1) // unit * unit)
        new = max((request.num_tokens - hit - external) * share // 4, 1)
        prompt_end = (request.num_prompt_tokens - 1) // self.config.hash_block_tokens
        if stop and self.aligns and prompt_end * self.config.hash_block_tokens > hit:
            new = prompt_end * self.config.hash_block_tokens - hit
        if not self.grow(request, new, hit=hit, external=external, blocks=blocks):
            return False
        self.manager.record_admission(request, hit)
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def grow(
        self,
        request: RequestState,
        num_new: int,
        *,
        hit: int = 0,
        external: int = 0,
        blocks: Any = None,
        num_drafts: int = 0,
    ) -> bool:
        before = self.manager.pool.num_free_blocks
        granted = self.manager.allocate_slots(
            request,
            num_new + num_drafts,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            num_encoder_tokens=5,
        )
        if granted is None:
            assert self.manager.pool.num_free_blocks >= before
            return False
        request.num_computed_tokens += hit + external + num_new
        for group, table in zip(self.manager.groups, self.table(request), strict=True):
            if not isinstance(self.config.groups[group.group_id], CrossSpec):
                assert len(table) * group.block_tokens >= request.num_computed_tokens
        return True

    def table(self, request: RequestState) -> Any:
        return self.manager.block_table(request.request_id)

    @precondition(lambda self: self.running)
    @rule(times=st.integers(1, 6), num_drafts=st.integers(0, 2), num_accepted=st.integers(0, 2))
    def compute_all(self, times: int, num_drafts: int, num_accepted: int) -> None:
        for _ in range(times):
            for request in [*self.running]:
                if request not in self.running:
                    continue
                self.compute(request, num_drafts, min(num_accepted, num_drafts))
            self.step()

    def compute(self, request: RequestState, num_drafts: int, num_accepted: int) -> None:
        assert request.content is not None
        missing = request.num_tokens - request.num_computed_tokens
        if missing > 0:
            if not self.grow(request, missing):
                self.preempt(self.running[-1])
            return
        if request.num_tokens + 4 > MAX_MODEL_LEN:
            self.finish(request)
            return
        self.append(request, [2])
        if self.grow(request, 1, num_drafts=num_drafts):
            self.append(request, [3] * num_accepted)
            request.num_computed_tokens += num_accepted

    def append(self, request: RequestState, tokens: list[int]) -> None:
        assert request.content is not None
        request.content.tokens.extend(tokens)
        request.num_tokens += len(tokens)
        self.hash(request)

    def finish(self, request: RequestState) -> None:
        self.manager.free(request.request_id)
        self.running.remove(request)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 7), again=st.booleans())
    def give_up(self, number: int, again: bool) -> None:
        request = self.running[number % len(self.running)]
        if again:
            self.preempt(request)
        else:
            self.finish(request)

    def preempt(self, request: RequestState) -> None:
        self.finish(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 7), num_back=st.integers(0, 9))
    def roll_back(self, number: int, num_back: int) -> None:
        request = self.running[number % len(self.running)]
        position = max(request.num_computed_tokens - num_back, 1)
        before = [list(table) for table in self.table(request)]
        try:
            self.manager.truncate(request, position)
        except BadInputError:
            assert [list(table) for table in self.table(request)] == before
        else:
            assert len(request.hashes) == request.num_tokens // self.config.hash_block_tokens

    @rule(blocks=st.lists(st.integers(0, 23), min_size=1, max_size=3))
    def evict_or_reset(self, blocks: list[int]) -> None:
        self.manager.evict_blocks([BlockId(block) for block in blocks])
        unused = self.manager.pool.num_used_blocks == 0
        if blocks[0] == 0:
            assert self.manager.reset_prefix_cache() == unused

    def step(self) -> None:
        self.manager.start_step()
        self.manager.release_copies(self.manager.take_copies())

    @invariant()
    def everything_adds_up(self) -> None:
        check_pool(self.manager.pool)
        waiting = [copy for group in self.manager.groups for copy in getattr(group, "_copies", [])]
        check_owners(self.manager, waiting)
        self.manager.pool.take_events()

    @invariant()
    def statistics_stay_within_bounds(self) -> None:
        assert 0.0 <= self.manager.take_stats().hit_rate <= 1.0


@pytest.mark.parametrize(
    ("groups", "changes"),
    SETTINGS,
    ids=lambda value: "+".join(spec.kind for spec in value) if isinstance(value, tuple) else None,
)
def test_nothing_is_lost_or_shared_wrongly_in_random_lives(
    groups: tuple[LayerSpec, ...], changes: dict[str, Any]
) -> None:
    machine = type("Chosen", (CacheMachine,), {"groups": groups, "changes": changes})
    run_state_machine_as_test(
        machine,
        settings=settings(deadline=None, max_examples=14, stateful_step_count=50, derandomize=True),
    )
