"""What one engine can take, and refusing at the door what it never could."""

from dataclasses import dataclass
from typing import Literal, get_args

from kvferry.cluster.serving.requests import EngineRequest
from kvferry.proto.errors import ConfigError, NeverFitsError, PromptTooLongError
from kvferry.proto.group_specs import takes_partial_loads
from kvferry.proto.specs import LayerSpec, RequestLimits, require_one_of

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one engine can take; sizes in tokens or blocks (null block included).

    A block is what a block id covers over all ranks: `block_tokens` are those of a virtual block.
    `specs`: what such a block of each cache group is.
    """

    num_blocks: int
    block_tokens: int
    max_model_len: int
    token_budget: int
    max_running: int
    specs: tuple[LayerSpec, ...]
    policy: Policy = "fcfs"

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_model_len", "token_budget", "max_running"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer", given=value, allowed=">= 1")
        require_one_of("policy", self.policy, get_args(Policy))

    @property
    def takes_partial_loads(self) -> bool:
        """Whether the first blocks of a load that ended early are of use."""
        return takes_partial_loads(self.specs)

    def needed_blocks(self, request: EngineRequest) -> int:
        """Return the most blocks a request holds at once until it ends, plus the null block.

        The last generated token is never written, so it needs no slot.
        """
        tokens = len(request.prompt_token_ids)
        tokens += 0 if request.prefill_only else max(request.sampling.max_tokens - 1, 0)
        whole = -(-tokens // self.block_tokens)
        bounds = RequestLimits(max_model_len=tokens, max_in_flight_tokens=self.token_budget)
        return sum(min(whole, spec.request_pages(bounds)) for spec in self.specs) + 1


def require_fits(request: EngineRequest, limits: Limits) -> None:
    """Refuse a request that can never run here, before it enters a queue.

    Raises:
        ConfigError: an empty prompt.
        PromptTooLongError: prompt and generated tokens exceed the model's limit.
        NeverFitsError: it needs more blocks than the pool has.
    """
    prompt = len(request.prompt_token_ids)
    if prompt == 0:
        raise ConfigError("the prompt is empty", given=0, allowed=">= 1 token")
    total = prompt + request.sampling.max_tokens
    if total > limits.max_model_len:
        raise PromptTooLongError(
            f"request {request.request_id} is longer than the model's limit",
            given={"prompt_tokens": prompt, "max_tokens": request.sampling.max_tokens},
            allowed={"max_model_len": limits.max_model_len},
        )
    needed = limits.needed_blocks(request)
    if needed > limits.num_blocks:
        raise NeverFitsError(
            f"request {request.request_id} can never fit the pool",
            given={"needed_blocks": needed, "have_blocks": limits.num_blocks},
            allowed=f"num_blocks >= {needed} (null block included)",
        )
