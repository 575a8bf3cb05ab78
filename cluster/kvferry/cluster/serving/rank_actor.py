"""One rank of an engine instance: model, KV tensors, transfer server and engine loop in a process.

A plain class; the launcher wraps it with Ray. It composes the worker (bytes) and the engine
(queues), and registers the instance with the coordinator.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch

from kvferry.cluster.ports import CoordinatorPort
from kvferry.cluster.serving.engine import Engine
from kvferry.cluster.serving.limits import Limits, Policy
from kvferry.cluster.serving.pool_size import KvSize, LengthLimit, PoolPlan, plan_pool
from kvferry.cluster.serving.requests import EngineRequest, OutputBatch
from kvferry.cluster.serving.sequence import Run
from kvferry.coordinator.sizing import kv_cache_bytes
from kvferry.proto.bind import reachable_address
from kvferry.proto.errors import ConfigError
from kvferry.proto.group_specs import specs_of
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import Incarnation, InstanceId, RequestId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import InstanceInfo, Registered, RegisterInstance, Role, expect
from kvferry.proto.scheme import Algorithm, HashScheme, KeyFormat
from kvferry.worker.device import Device, open_device
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.model.loading import LoadedModel, load_model
from kvferry.worker.model.profiling import non_kv_peak_bytes
from kvferry.worker.model.runner import ModelRunner, SequenceSlice
from kvferry.worker.model.sampling import sample
from kvferry.worker.service import WorkerService

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a rank is told by the launcher; sizes in tokens where nothing else is said."""

    instance_id: InstanceId
    role: Role
    model: str
    dtype: str
    device: str
    block_tokens: int
    kv_size: KvSize
    max_model_len: LengthLimit
    token_budget: int
    max_running: int
    policy: Policy
    algorithm: Algorithm
    key_format: KeyFormat
    bind: str
    insecure: bool


def scheme_of_this_process(settings: RankSettings) -> HashScheme:
    """Return the hash scheme, its root taken from this process's own PYTHONHASHSEED.

    Raises:
        ConfigError: the variable is not set, so that no two processes would agree.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        raise ConfigError(
            "PYTHONHASHSEED is not set in this process, so its block hashes would match nobody's",
            given="unset",
            allowed="the service's hash seed, through Ray's runtime environment",
        )
    return make_scheme(
        seed=seed,
        hash_block_tokens=settings.block_tokens,
        algorithm=settings.algorithm,
        key_format=settings.key_format,
    )


class RankActor:
    """One engine rank. Nothing happens before `start`, so construction cannot fail."""

    def __init__(self, settings: RankSettings, node_host: Callable[[], str]) -> None:
        self._settings = settings
        self._node_host = node_host
        self._worker: WorkerService | None = None
        self._engine: Engine | None = None

    def start(self, coordinator: CoordinatorPort) -> InstanceInfo:
        """Load the model, open the transfer server, register and start the loop.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: sizes or the environment are wrong, or the memory is too small.
            MismatchError: the coordinator refused the registration.
        """
        settings = self._settings
        logging.basicConfig(stream=sys.stderr, level=logging.INFO)
        scheme = scheme_of_this_process(settings)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        loaded = load_model(settings.model, dtype=settings.dtype)
        device = open_device(settings.device)
        torch.nn.Module.to(loaded.model, device.name)
        pool = _plan_pool(settings, loaded, device)
        memory = KvMemory(
            device,
            loaded.identity,
            num_blocks=pool.num_blocks,
            layout=Layout(block_tokens=settings.block_tokens),
        )
        incarnation = Incarnation(time.time_ns())
        worker = WorkerService(incarnation=incarnation, memory=memory)
        self._worker = worker
        info = InstanceInfo(
            instance_id=settings.instance_id,
            role=settings.role,
            incarnation=incarnation,
            identity=loaded.identity,
            scheme=scheme,
            layout=Layout(block_tokens=settings.block_tokens),
            num_blocks=pool.num_blocks,
            rank_addresses=(self._serve(worker),),
            max_model_len=pool.max_model_len,
            max_in_flight_tokens=settings.token_budget,
            rank_pids=(os.getpid(),),
            version=version("kvferry"),
        )
        registered = self._register(coordinator, info)
        self._engine = Engine(
            instance_id=settings.instance_id,
            incarnation=incarnation,
            epoch=registered.epoch,
            limits=_limits(settings, info),
            scheme=scheme,
            eos_token_ids=frozenset(loaded.eos_token_ids),
            coordinator=coordinator,
            mover=worker,
            forward=_Forward(loaded, memory, settings.block_tokens),
            tells_content=registered.wants_content,
        )
        self._engine.start()
        return info

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; raises what `Engine.submit` raises."""
        self._started().submit(request)

    def abort(self, request_id: RequestId) -> None:
        """End a request early; unknown ids are ignored."""
        self._started().abort(request_id)

    def outputs(self, since_seq: int, wait_s: float) -> OutputBatch:
        """Return news from `since_seq` on, waiting up to `wait_s` for the first."""
        return self._started().outputs(since_seq, wait_s)

    def stop(self) -> None:
        """End loop and server; may be called at any time and more than once."""
        if self._engine is not None:
            self._engine.stop(STOP_TIMEOUT_S)
        if self._worker is not None:
            self._worker.stop()

    def _serve(self, worker: WorkerService) -> str:
        settings = self._settings
        address = worker.serve(bind=settings.bind, port=0, insecure=settings.insecure)
        return reachable_address(address, self._node_host)

    def _register(self, coordinator: CoordinatorPort, info: InstanceInfo) -> Registered:
        command = RegisterInstance(
            call_id=f"{info.instance_id}/{info.incarnation}/register", info=info
        )
        return expect(coordinator.call(command, timeout_s=REGISTER_TIMEOUT_S), Registered)

    def _started(self) -> Engine:
        if self._engine is None:
            raise ConfigError(f"instance {self._settings.instance_id} has not been started")
        return self._engine


def _plan_pool(settings: RankSettings, loaded: LoadedModel, device: Device) -> PoolPlan:
    """Plan the rank's pool; only a fraction of the memory needs measuring."""
    kv_bytes = settings.kv_size.kv_bytes or 0
    if settings.kv_size.memory_fraction is not None:
        total_bytes = device.total_bytes()
        peak_bytes = non_kv_peak_bytes(
            loaded,
            device,
            block_tokens=settings.block_tokens,
            token_budget=settings.token_budget,
            max_running=settings.max_running,
        )
        log.info("%d of %d bytes are taken beside the KV cache", peak_bytes, total_bytes)
        kv_bytes = kv_cache_bytes(total_bytes, settings.kv_size.memory_fraction, peak_bytes)
    return plan_pool(
        loaded.identity,
        who=settings.instance_id,
        block_tokens=settings.block_tokens,
        token_budget=settings.token_budget,
        model_len=loaded.max_model_len,
        max_model_len=settings.max_model_len,
        num_blocks=settings.kv_size.num_blocks,
        kv_bytes=kv_bytes,
    )


def _limits(settings: RankSettings, info: InstanceInfo) -> Limits:
    return Limits(
        num_blocks=info.num_blocks,
        block_tokens=settings.block_tokens,
        max_model_len=info.max_model_len,
        token_budget=settings.token_budget,
        max_running=settings.max_running,
        specs=specs_of(info.identity, settings.block_tokens),
        policy=settings.policy,
    )


class _Forward:
    """Runs slices through the model and samples where a token is wanted."""

    def __init__(self, loaded: LoadedModel, memory: KvMemory, block_tokens: int) -> None:
        self._runner = ModelRunner(loaded, memory.layers, block_tokens)

    def __call__(self, runs: tuple[Run, ...]) -> dict[RequestId, int]:
        logits = self._runner.forward(
            [
                SequenceSlice(
                    token_ids=run.token_ids,
                    start_position=run.start_position,
                    block_tables=run.block_tables,
                )
                for run in runs
            ]
        )
        return {
            run.request.request_id: sample(
                row, run.request.sampling, position=run.start_position + len(run.token_ids)
            )
            for run, row in zip(runs, logits, strict=True)
            if run.sample
        }
