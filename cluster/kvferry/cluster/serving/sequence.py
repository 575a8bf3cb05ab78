"""One request inside an engine: its tokens, hash chain, block table and accounting."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvferry.cluster.serving.requests import (
    Accounting,
    EngineRequest,
    Finished,
    FinishReason,
    Output,
)
from kvferry.proto.hashing import HashChain
from kvferry.proto.ids import BlockHash, BlockId, GroupId, RequestId
from kvferry.proto.restore_messages import RestoredRequest
from kvferry.proto.scheme import HashScheme
from kvferry.proto.shared_chain import hashes_per_block
from kvferry.proto.step_messages import AdmitAsk, Progress, RequestContent

Origin = Literal["local", "remote", "computed"]


class WrittenBlock(NamedTuple):
    """A block of a group that holds all of its hash's content."""

    group_id: GroupId
    block_hash: BlockHash
    block_id: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One slice of the next forward pass; `sample` says whether its last logits are needed.

    `block_tables`: where the sequence's tokens are, per cache group.
    """

    request: EngineRequest
    token_ids: tuple[int, ...]
    start_position: int
    block_tables: tuple[tuple[BlockId, ...], ...]
    sample: bool


class Sequence:
    """Prompt and generated tokens of one request while it waits, loads or runs.

    `block_tables` holds a table per cache group. Where a group gave a block back, its table may
    still name it: nothing after that reads it. `granted_tokens`: slots `[0, n)` may be written.

    Args:
        request: what was asked.
        scheme: how its tokens are hashed.
        block_tokens: tokens of a virtual block, a multiple of the scheme's hash block.
        num_groups: cache groups of the model.

    Raises:
        ConfigError: blocks that are no multiple of a hash block.
    """

    def __init__(
        self, request: EngineRequest, scheme: HashScheme, block_tokens: int, num_groups: int
    ) -> None:
        self.request = request
        self._block_tokens = block_tokens
        self._hashes_per_block = hashes_per_block(block_tokens, scheme.hash_block_tokens)
        self._tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.chain = HashChain(scheme, request.keys)
        self.chain.extend(self._tokens)
        self.num_reported_hashes = 0
        self._num_told_tokens: int | None = None  # None: nobody wants to know them
        self.block_tables: tuple[list[BlockId], ...] = tuple([] for _ in range(num_groups))
        self.granted_tokens = 0
        self.num_computed_tokens = 0
        self.num_hit_tokens = 0
        self._attributed_tokens = 0
        self._origins: dict[Origin, int] = {"local": 0, "remote": 0, "computed": 0}
        self.ahead_tokens = 0
        self.pulled_bytes = 0
        self.preemptions = 0
        self.was_admitted = False
        self.cancelled = False
        self.aborted = False
        self.load_failed = False

    @property
    def request_id(self) -> RequestId:
        """Identity of the request."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known so far."""
        return len(self._tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, those made elsewhere included."""
        return self.num_tokens - self.prompt_tokens

    @property
    def last_output_token(self) -> int | None:
        """The token generated last, here or elsewhere; None before the first."""
        return self._tokens[-1] if self.num_output_tokens else None

    @property
    def target_tokens(self) -> int:
        """Tokens to compute before the next token is sampled (or the prefill is done)."""
        if self.request.prefill_only:
            return (self.num_tokens - 1) // self._block_tokens * self._block_tokens
        return self.num_tokens

    @property
    def runnable_tokens(self) -> int:
        """Tokens that can be computed now: they are known and have slots."""
        return min(self.target_tokens, self.granted_tokens) - self.num_computed_tokens

    @property
    def slots_ahead(self) -> int:
        """Slots beyond the tokens to compute; negative: so many are missing."""
        return self.granted_tokens - self.target_tokens

    def grant(self, new_block_ids: Iterable[Iterable[BlockId]], granted_tokens: int) -> None:
        """Append blocks to each group's table and allow tokens up to `granted_tokens`."""
        for table, new in zip(self.block_tables, new_block_ids, strict=True):
            table.extend(new)
        self.granted_tokens = max(self.granted_tokens, granted_tokens)

    def take_tables(self, tables: Iterable[tuple[BlockId, ...]]) -> None:
        """Append what these tables, which begin as the own ones do, have beyond them."""
        for own, table in zip(self.block_tables, tables, strict=True):
            own.extend(table[len(own) :])

    def rank(self) -> int:
        """Return the sort key of the priority policy; lower runs first."""
        return self.request.priority

    def append(self, token: int) -> None:
        """Add a generated token and hash the block it may have filled."""
        self._tokens.append(token)
        self.chain.extend((token,))

    def run(self, num_new_tokens: int) -> Run:
        """Return the slice of the next `num_new_tokens` uncomputed tokens."""
        start = self.num_computed_tokens
        end = start + num_new_tokens
        return Run(
            request=self.request,
            token_ids=tuple(self._tokens[start:end]),
            start_position=start,
            block_tables=tuple(tuple(table) for table in self.block_tables),
            sample=end == self.num_tokens and not self.request.prefill_only,
        )

    def written_since(self, num_computed_before: int) -> Iterator[WrittenBlock]:
        """Yield the blocks that became completely written since a computed-token count."""
        first = num_computed_before // self._block_tokens
        for index in range(first, self.num_computed_tokens // self._block_tokens):
            block_hash = self.chain.hashes[(index + 1) * self._hashes_per_block - 1]
            for group_id, table in enumerate(self.block_tables):
                yield WrittenBlock(GroupId(group_id), block_hash, table[index])

    def content(self) -> RequestContent:
        """Tell all tokens and keys; from now on progress tells the tokens that are new."""
        self._num_told_tokens = self.num_tokens
        return RequestContent(tokens=tuple(self._tokens), keys=self.request.keys)

    def restored(self, *, with_content: bool) -> RestoredRequest:
        """Return what it is, running, for a coordinator that does not know it."""
        self.num_reported_hashes = len(self.chain.hashes)
        return RestoredRequest(
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            num_computed_tokens=self.num_computed_tokens,
            hashes=tuple(self.chain.hashes),
            block_ids=tuple(map(tuple, self.block_tables)),
            content=self.content() if with_content else None,
        )

    def progress(self) -> Progress:
        """Report what is written and the hashes (and tokens, once told) not reported before."""
        new_hashes = tuple(self.chain.hashes[self.num_reported_hashes :])
        self.num_reported_hashes += len(new_hashes)
        new_tokens: tuple[int, ...] = ()
        if self._num_told_tokens is not None:
            new_tokens = tuple(self._tokens[self._num_told_tokens :])
            self._num_told_tokens = self.num_tokens
        return Progress(
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            num_computed_tokens=self.num_computed_tokens,
            new_hashes=new_hashes,
            new_tokens=new_tokens,
        )

    def end_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Return why it ends with the token that was generated last, if it does."""
        last, sampling = self.last_output_token, self.request.sampling
        if self.request.prefill_only or last is None:
            return None
        stops = set(sampling.stop_token_ids)
        stops |= frozenset() if sampling.ignore_eos else eos_token_ids
        if last in stops:
            return "stop"
        return "length" if self.num_output_tokens >= sampling.max_tokens else None

    def in_place(self, origin: Origin, end: int) -> None:
        """Note that tokens `[0, end)` are in place, the new ones among them from this origin.

        Each prompt token is attributed once: what a preempted request finds or computes again
        does not count a second time.
        """
        end = min(end, self.prompt_tokens)
        if end > self._attributed_tokens:
            self._origins[origin] += end - self._attributed_tokens
            self._attributed_tokens = end

    def ask(self, *, with_content: bool) -> AdmitAsk:
        """Return what it asks for admission with; its hashes (and tokens) are reported with it."""
        self.num_reported_hashes = len(self.chain.hashes)
        return AdmitAsk(
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            target_tokens=self.target_tokens,
            hashes=tuple(self.chain.hashes),
            resumed=self.was_admitted,
            # Who failed must not be asked again, and what came before is likely to be here.
            allow_remote=not self.load_failed,
            ahead_tokens=0 if self.was_admitted else self.ahead_tokens,
            content=self.content() if with_content else None,
        )

    def came_ahead(self, num_computed_tokens: int) -> None:
        """Take in the end of a load ahead of the admission; its blocks are given back.

        What came can be found when the request is admitted, but it is remote all the same.
        """
        self.in_place("local", self.num_hit_tokens)
        self.in_place("remote", num_computed_tokens)
        self.ahead_tokens = self._origins["remote"]
        self.reset()

    def accounting(self) -> Accounting:
        """Return where the prompt's KV has come from so far."""
        return Accounting(
            prompt_tokens=self.prompt_tokens,
            local_hit_tokens=self._origins["local"],
            remote_hit_tokens=self._origins["remote"],
            computed_tokens=self._origins["computed"],
        )

    def ended(self, reason: FinishReason, accounting: Accounting | None = None) -> Output:
        """Return the news that it has ended here, with its own accounting or another."""
        finished = Finished(
            reason=reason,
            accounting=accounting or self.accounting(),
            pulled_bytes=self.pulled_bytes,
            preemptions=self.preemptions,
            ahead_tokens=self.ahead_tokens,
        )
        return Output(request_id=self.request_id, finished=finished)

    def reset(self) -> None:
        """Forget all blocks (preemption): everything is computed or found again."""
        for table in self.block_tables:
            table.clear()
        self.granted_tokens = 0
        self.num_computed_tokens = 0
        self.num_hit_tokens = 0
        self.cancelled = False
