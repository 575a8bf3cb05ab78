"""What goes into an engine and what comes out of it: values only."""

from dataclasses import dataclass, field
from typing import Literal

from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.ids import RequestId
from kvferry.worker.model.sampling import SamplingParams

FinishReason = Literal["stop", "length", "prefilled", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt for one engine.

    `output_token_ids` were already produced elsewhere (the request moved here). With
    `prefill_only` the engine computes the prompt's full blocks short of the last token and stops.
    One that `follows_prefill` has an open handoff from an instance that does so meanwhile.
    Lower `priority` runs first under the priority policy, equal ones in their order of arrival.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    keys: RequestKeys = field(default_factory=RequestKeys)
    prefill_only: bool = False
    follows_prefill: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """How each prompt token's KV came into place at this instance, the first time it did.

    The three parts add up to `prompt_tokens` for every request that ran to its end here. All four
    are 0 for one that came with its last token, since its engine died before telling the end.
    """

    prompt_tokens: int
    local_hit_tokens: int
    remote_hit_tokens: int
    computed_tokens: int

    @property
    def adds_up(self) -> bool:
        """Tell whether it can be that of a request that has ended."""
        parts = self.local_hit_tokens + self.remote_hit_tokens + self.computed_tokens
        return parts == self.prompt_tokens


NOTHING_NEEDED = Accounting(
    prompt_tokens=0, local_hit_tokens=0, remote_hit_tokens=0, computed_tokens=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a request ended at this instance.

    `ahead_tokens`: so many of its remote hit tokens came before its prefill elsewhere was over.
    """

    reason: FinishReason
    accounting: Accounting
    pulled_bytes: int
    preemptions: int
    ahead_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """News of one request: tokens in order, and at the end how it finished."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBatch:
    """All news since the asked sequence number; ask for `next_seq` next time."""

    outputs: tuple[Output, ...]
    next_seq: int
