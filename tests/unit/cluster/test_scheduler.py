"""The engine's queues against the real coordinator service, without model or threads."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
from tests.builders import make_identity, make_info

from kvferry.cluster.serving.limits import Limits, Policy, require_fits
from kvferry.cluster.serving.requests import NOTHING_NEEDED, EngineRequest, Finished, Output
from kvferry.cluster.serving.scheduler import Scheduler, Work
from kvferry.cluster.serving.sequence import Run
from kvferry.coordinator.invariants import check
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import ConfigError, NeverFitsError, PromptTooLongError
from kvferry.proto.group_specs import specs_of
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import Epoch, Incarnation, InstanceId, RequestId
from kvferry.proto.messages import (
    Locate,
    Located,
    RegisterInstance,
    Role,
)
from kvferry.proto.step_messages import LoadResult, StepReply
from kvferry.worker.model.sampling import SamplingParams

BLOCK = 4
SCHEME = make_scheme(seed="0", hash_block_tokens=BLOCK)
IDENTITY = make_identity(head_size=2)
EOS = 99


def limits(num_blocks: int = 20, **changes: object) -> Limits:
    values: dict[str, object] = {
        "num_blocks": num_blocks,
        "block_tokens": BLOCK,
        "max_model_len": 64,
        "token_budget": 16,
        "max_running": 8,
        "specs": specs_of(IDENTITY, BLOCK),
    }
    return Limits(**(values | changes))  # type: ignore[arg-type]


def request(
    name: str,
    prompt: range,
    max_tokens: int = 3,
    *,
    prefill_only: bool = False,
    follows_prefill: bool = False,
    priority: int = 0,
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        prefill_only=prefill_only,
        follows_prefill=follows_prefill,
        priority=priority,
    )


@dataclass
class Rig:
    """Schedulers of several instances and the service they ask; tokens come from a counter."""

    service: CoordinatorService = field(
        default_factory=lambda: CoordinatorService(scheme=SCHEME, epoch=Epoch(1))
    )
    schedulers: dict[str, Scheduler] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    calls: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    tokens: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1000))

    def add_instance(self, name: str, role: Role = "decode", **changes: object) -> Scheduler:
        bounds = limits(**changes)  # type: ignore[arg-type]
        info = make_info(
            name,
            role=role,
            identity=IDENTITY,
            scheme=SCHEME,
            block_tokens=BLOCK,
            num_blocks=bounds.num_blocks,
            max_model_len=bounds.max_model_len,
        )
        self.service.handle(RegisterInstance(call_id=name, info=info), 0.0)
        scheduler = Scheduler(limits=bounds, scheme=SCHEME, eos_token_ids=frozenset({EOS}))
        self.schedulers[name] = scheduler
        return scheduler

    def ask(self, name: str) -> Work:
        step = self.schedulers[name].build_step(
            call_id=str(next(self.calls)),
            epoch=self.service.epoch,
            instance_id=InstanceId(name),
            incarnation=Incarnation(1),
        )
        reply, _ = self.service.handle(step, 0.0)
        assert isinstance(reply, StepReply)
        check(self.service)
        return self.schedulers[name].apply(reply)

    def compute(self, name: str, token: int | None = None) -> tuple[Run, ...]:
        """Compute what has slots; sampled tokens are `token` or never seen before."""
        scheduler = self.schedulers[name]
        runs = scheduler.next_runs()
        sampled = {
            run.request.request_id: next(self.tokens) if token is None else token
            for run in runs
            if run.sample
        }
        scheduler.computed(sampled)
        self.outputs += scheduler.take_outputs()
        return runs

    def step(self, name: str, token: int | None = None) -> tuple[Work, tuple[Run, ...]]:
        """Ask the coordinator, then compute what has slots."""
        work = self.ask(name)
        return work, self.compute(name, token)

    def finished(self, name: str) -> Finished:
        return next(o.finished for o in self.outputs if o.request_id == name and o.finished)

    def run_until_idle(self, name: str, at_most: int = 100) -> None:
        for _ in range(at_most):
            asked = self.schedulers[name].must_ask()
            if asked:
                self.ask(name)
            if not self.compute(name) and not asked:
                return
        raise AssertionError("the engine never became idle")


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_long_prompt_runs_in_chunks_of_the_budget_and_samples_only_at_its_end(rig: Rig) -> None:
    scheduler = rig.add_instance("d")
    scheduler.add(request("r", range(40)))
    chunks = [rig.step("d")[1][0] for _ in range(4)]
    assert [(run.start_position, len(run.token_ids), run.sample) for run in chunks] == [
        (0, 16, False),
        (16, 16, False),
        (32, 8, True),
        (40, 1, True),
    ]


def test_a_request_ends_after_max_tokens_and_gives_all_blocks_back(rig: Rig) -> None:
    scheduler = rig.add_instance("d")
    scheduler.add(request("r", range(10), max_tokens=3))
    rig.run_until_idle("d")
    finished = rig.finished("r")
    assert finished.reason == "length"
    assert finished.accounting.computed_tokens == 10
    assert sum(len(o.token_ids) for o in rig.outputs) == 3
    assert rig.service.state.instances[InstanceId("d")].manager.pool.num_free_blocks == 19


def test_an_end_token_ends_a_request(rig: Rig) -> None:
    rig.add_instance("d").add(request("r", range(5), max_tokens=10))
    rig.step("d", token=EOS)
    rig.run_until_idle("d")
    assert rig.finished("r").reason == "stop"


def test_the_second_of_two_equal_prompts_hits_all_but_the_last_block(rig: Rig) -> None:
    scheduler = rig.add_instance("d")
    scheduler.add(request("a", range(12)))
    rig.run_until_idle("d")
    scheduler.add(request("b", range(12)))
    rig.run_until_idle("d")
    accounting = rig.finished("b").accounting
    assert (accounting.local_hit_tokens, accounting.computed_tokens) == (8, 4)


def test_a_prefill_stops_at_the_last_full_block_short_of_the_last_token(rig: Rig) -> None:
    scheduler = rig.add_instance("p", "prefill")
    scheduler.add(request("r", range(12), prefill_only=True))
    _, runs = rig.step("p")
    assert [len(run.token_ids) for run in runs] == [8]
    rig.run_until_idle("p")
    assert rig.finished("r").reason == "prefilled"


def test_an_end_is_told_only_after_the_coordinator_has_taken_the_release(rig: Rig) -> None:
    # Whoever reads "prefilled" sends the request on to an instance that looks for its blocks.
    rig.add_instance("p", "prefill").add(request("r", range(12), prefill_only=True))
    rig.step("p")
    assert rig.outputs == []
    rig.step("p")
    assert rig.finished("r").reason == "prefilled"
    located, _ = rig.service.handle(
        Locate(identity_digest=IDENTITY.digest(), hashes=hash_tokens(SCHEME, range(8))), 0.0
    )
    assert isinstance(located, Located)
    assert [holder.num_hashes for holder in located.holders] == [2]


def test_a_prefill_of_less_than_a_block_has_nothing_to_do(rig: Rig) -> None:
    rig.add_instance("p", "prefill").add(request("r", range(4), prefill_only=True))
    rig.step("p")
    assert rig.finished("r").reason == "prefilled"


def test_a_prefix_held_by_a_peer_is_loaded_and_counted_as_remote(rig: Rig) -> None:
    rig.add_instance("p", "prefill").add(request("at-p", range(14), prefill_only=True))
    rig.run_until_idle("p")
    decode = rig.add_instance("d")
    decode.add(request("r", range(14)))
    (order,) = rig.step("d")[0].loads
    assert order.load.source.instance_id == "p"
    (run,) = order.loads
    assert (run.group_id, len(run.hashes), len(run.block_ids)) == (0, 3, 3)
    result = LoadResult(request_id=RequestId("r"), num_computed_tokens=12)
    decode.load_ended(result, pulled_bytes=300)
    rig.run_until_idle("d")
    finished = rig.finished("r")
    accounting = finished.accounting
    assert (accounting.remote_hit_tokens, accounting.computed_tokens) == (12, 2)
    assert finished.pulled_bytes == 300


def test_a_preempted_request_finishes_and_its_prompt_is_counted_once(rig: Rig) -> None:
    scheduler = rig.add_instance("d", num_blocks=7)
    scheduler.add(request("a", range(8), max_tokens=9))
    scheduler.add(request("b", range(100, 108), max_tokens=9))
    rig.run_until_idle("d")
    a, b = rig.finished("a"), rig.finished("b")
    assert (a.preemptions, b.preemptions) == (0, 1)
    for finished in (a, b):
        parts = finished.accounting
        assert parts.local_hit_tokens + parts.remote_hit_tokens + parts.computed_tokens == 8
    assert sum(len(o.token_ids) for o in rig.outputs) == 18


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "b"), ("priority", "a")])
def test_the_policy_chooses_the_victim(rig: Rig, policy: Policy, victim: str) -> None:
    scheduler = rig.add_instance("d", num_blocks=7, policy=policy)
    scheduler.add(request("a", range(8), max_tokens=9, priority=1))
    scheduler.add(request("b", range(100, 108), max_tokens=9, priority=0))
    rig.run_until_idle("d")
    assert [name for name in "ab" if rig.finished(name).preemptions] == [victim]


def test_aborting_frees_a_running_request_and_forgets_a_waiting_one(rig: Rig) -> None:
    scheduler = rig.add_instance("d", max_running=1)
    scheduler.add(request("a", range(8), max_tokens=9))
    scheduler.add(request("b", range(8), max_tokens=9))
    rig.step("d")
    assert scheduler.abort(RequestId("a")) is None
    assert scheduler.abort(RequestId("b")) is None
    assert scheduler.abort(RequestId("unknown")) is None
    rig.run_until_idle("d")
    assert rig.finished("a").reason == rig.finished("b").reason == "aborted"
    assert rig.service.state.instances[InstanceId("d")].manager.pool.num_free_blocks == 19


def test_aborting_during_a_load_waits_for_its_writer(rig: Rig) -> None:
    rig.add_instance("p", "prefill").add(request("at-p", range(14), prefill_only=True))
    rig.run_until_idle("p")
    decode = rig.add_instance("d")
    decode.add(request("r", range(14)))
    rig.step("d")
    pool = rig.service.state.instances[InstanceId("d")].manager.pool
    assert decode.abort(RequestId("r")) == "r"
    assert pool.num_free_blocks == 16
    decode.load_ended(LoadResult(request_id=RequestId("r"), num_computed_tokens=0), 0)
    rig.run_until_idle("d")
    assert rig.finished("r").reason == "aborted"
    assert pool.num_free_blocks == 19


def test_an_abort_between_a_cancelled_loads_end_and_its_preemption_is_not_lost(rig: Rig) -> None:
    rig.add_instance("p", "prefill").add(request("at-p", range(14), prefill_only=True))
    rig.run_until_idle("p")
    decode = rig.add_instance("d", num_blocks=8)
    decode.add(request("a", range(100, 104), max_tokens=16))
    rig.step("d")
    decode.add(request("r", range(14), max_tokens=1))
    cancelled = [rig.step("d")[0].cancel_loads for _ in range(15)]
    assert ("r",) in cancelled
    decode.load_ended(LoadResult(request_id=RequestId("r"), num_computed_tokens=0), 0)
    decode.abort(RequestId("r"))
    rig.run_until_idle("d")
    assert rig.finished("r").reason == "aborted"
    assert rig.finished("a").reason == "length"


def test_a_moved_request_goes_on_after_its_last_token(rig: Rig) -> None:
    scheduler = rig.add_instance("d")
    moved = EngineRequest(
        request_id=RequestId("r"),
        prompt_token_ids=tuple(range(6)),
        output_token_ids=(7, 8),
        sampling=SamplingParams(max_tokens=3),
    )
    scheduler.add(moved)
    rig.run_until_idle("d")
    assert [len(o.token_ids) for o in rig.outputs if o.token_ids] == [1]
    assert rig.finished("r").accounting.computed_tokens == 6


def test_a_request_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    with pytest.raises(NeverFitsError) as refused:
        require_fits(request("r", range(20), max_tokens=5), limits(num_blocks=6))
    assert refused.value.given == {"needed_blocks": 7, "have_blocks": 6}
    require_fits(request("r", range(20), max_tokens=5), limits(num_blocks=7))


def test_a_prompt_beyond_the_models_limit_is_refused() -> None:
    with pytest.raises(PromptTooLongError, match="max_model_len=64"):
        require_fits(request("r", range(62), max_tokens=3), limits())


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        require_fits(request("r", range(0)), limits())


@pytest.mark.parametrize("tells", [False, True])
def test_tokens_are_told_once_and_only_where_they_are_wanted(rig: Rig, tells: bool) -> None:
    rig.add_instance("d0")
    scheduler = Scheduler(
        limits=limits(), scheme=SCHEME, eos_token_ids=frozenset({EOS}), tells_content=tells
    )
    rig.schedulers["d0"] = scheduler
    scheduler.add(request("r", range(1, 6)))
    told: list[tuple[int, ...] | None] = []
    for _ in range(4):
        step = scheduler.build_step(
            call_id=str(next(rig.calls)),
            epoch=Epoch(1),
            instance_id=InstanceId("d0"),
            incarnation=Incarnation(1),
        )
        told += [ask.content.tokens if ask.content else None for ask in step.waiting]
        told += [progress.new_tokens for progress in step.progress]
        reply, _ = rig.service.handle(step, 0.0)
        assert isinstance(reply, StepReply)
        scheduler.apply(reply)
        runs = scheduler.next_runs()
        scheduler.computed({run.request.request_id: next(rig.tokens) for run in runs})
    content = (1, 2, 3, 4, 5) if tells else None
    assert told == [content, *[(token,) if tells else () for token in (1000, 1001, 1002)]]


@pytest.mark.parametrize(("outputs", "reason"), [((7, 8, 9), "length"), ((7, EOS), "stop")])
def test_a_request_that_moves_with_its_last_token_ends_without_another(
    rig: Rig, outputs: tuple[int, ...], reason: str
) -> None:
    scheduler = rig.add_instance("d")
    moved = EngineRequest(
        request_id=RequestId("r"),
        prompt_token_ids=tuple(range(6)),
        output_token_ids=outputs,
        sampling=SamplingParams(max_tokens=3),
    )
    scheduler.add(moved)
    assert not scheduler.must_ask()
    rig.run_until_idle("d")
    assert [o.token_ids for o in rig.outputs] == [()]
    assert rig.finished("r").reason == reason
    accounting = rig.finished("r").accounting
    assert accounting == NOTHING_NEEDED
    assert accounting.adds_up
    assert not replace(accounting, computed_tokens=5).adds_up
    assert not replace(accounting, prompt_tokens=6).adds_up
