"""What a demo run needs at least, known before anything is started."""

from collections.abc import Iterator

from kvferry.cluster.config import ServiceConfig
from kvferry.cluster.demo.conversation import PromptWriter, Turn
from kvferry.cluster.serving.limits import Limits, require_fits
from kvferry.cluster.serving.requests import EngineRequest
from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import RequestId
from kvferry.worker.model.sampling import SamplingParams

EXTRA_MAX_TOKENS = 2


def longest_requests(
    turns: tuple[Turn, ...], writer: PromptWriter, sampling: SamplingParams
) -> Iterator[EngineRequest]:
    """Yield every request as long as it can become: each earlier answer of `max_tokens` tokens."""
    lengths: dict[int, int] = {}
    for turn in turns:
        if turn.session not in lengths:
            length = len(writer.first_turn(turn.question))
        else:
            past = lengths[turn.session]
            length = writer.longest_next_turn(past, sampling.max_tokens, turn.question)
        lengths[turn.session] = length
        yield _of_length(turn.request_id, length, sampling)
    extra = SamplingParams(max_tokens=EXTRA_MAX_TOKENS)
    yield _of_length("extra", len(writer.extra_prompt()), extra)


def min_num_blocks(requests: tuple[EngineRequest, ...], limits: Limits) -> int:
    """Return the smallest pool (null block included) in which each request fits alone."""
    return max(limits.needed_blocks(request) for request in requests)


def require_all_fit(requests: tuple[EngineRequest, ...], limits: Limits) -> None:
    """Refuse a run in which some request could never be served.

    Raises:
        PromptTooLongError, NeverFitsError: naming the request that needs most.
    """
    for request in sorted(requests, key=limits.needed_blocks, reverse=True):
        require_fits(request, limits)


def require_memory(config: ServiceConfig, *, block_bytes: int, memory_bytes: int) -> None:
    """Refuse pools that this machine's memory cannot hold, when all instances are to run on it.

    Args:
        config: of the service.
        block_bytes: bytes of one block over all layers.
        memory_bytes: of this machine.

    Raises:
        ConfigError: with the bytes of both.
    """
    kv_bytes = config.num_instances * config.num_blocks * block_bytes
    if config.ray_address == "local" and kv_bytes > memory_bytes:
        raise ConfigError(
            f"{config.num_instances} pools of {config.num_blocks} blocks do not fit this machine",
            given={"kv_bytes": kv_bytes, "memory_bytes": memory_bytes},
            allowed=f"num_blocks <= {memory_bytes // (config.num_instances * block_bytes)}",
        )


def _of_length(request_id: str, num_tokens: int, sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(request_id), prompt_token_ids=(0,) * num_tokens, sampling=sampling
    )
