"""Refuses a step that contradicts itself or what the coordinator knows, before it changes anything.

Reports about requests that are gone are no contradiction: a completion may cross an abort.
"""

from collections.abc import Iterable

from kvferry.coordinator.instances import Instance, LoadInFlight
from kvferry.proto.errors import BadInputError, NeverFitsError, NotFoundError, PromptTooLongError
from kvferry.proto.ids import RequestId
from kvferry.proto.messages import EndReservation
from kvferry.proto.step_messages import (
    AdmitAsk,
    LoadFailure,
    LoadResult,
    MoveEnd,
    Progress,
    Step,
)


def check_step(instance: Instance, step: Step) -> None:
    """Check every part of a step against an instance.

    Raises:
        BadInputError: a count that contradicts another one; naming the request and both.
        NotFoundError: a running request that is not known.
        NeverFitsError: a waiting request needs more blocks than the pool has.
        PromptTooLongError: a target beyond the instance's `max_model_len`.

    """
    for name in ("token_budget", "ahead_tokens"):
        value = getattr(step, name)
        if type(value) is not int or value < 0:
            raise BadInputError(
                f"{name} must be a number of tokens", given=repr(value), allowed=">= 0"
            )
    for part in ("load_results", "progress", "releases", "running", "waiting"):
        _refuse_repeats(part, (item.request_id for item in getattr(step, part)))
    _check_ends(instance, step)
    ended_loads = {result.request_id: result for result in step.load_results}
    for progress in step.progress:
        _check_progress(instance, progress, ended_loads)
    released = {release.request_id for release in step.releases}
    for running in step.running:
        request_id = running.request_id
        if request_id not in instance.requests or request_id in released:
            raise NotFoundError("not a running request", given=request_id)
        if request_id in instance.loads and request_id not in ended_loads:
            raise BadInputError("a running request's load has not been reported", given=request_id)
        _check_target(instance, request_id, running.target_tokens)
    newcomers = (*step.waiting, *step.follows)
    _refuse_repeats("waiting and follows", (ask.request_id for ask in newcomers))
    for ask in newcomers:
        if ask.request_id not in released:
            if ask.request_id in instance.requests:
                raise BadInputError("a waiting request is admitted already", given=ask.request_id)
            if ask.request_id in instance.followers:
                raise BadInputError("a request follows a prefill already", given=ask.request_id)
        _check_admission(instance, ask)


def _check_ends(instance: Instance, step: Step) -> None:
    for result in step.load_results:
        _check_load_result(instance, result)
    for end in step.moves_ended:
        check_written(instance, end)


def check_written(instance: Instance, end: EndReservation | MoveEnd) -> None:
    """Refuse an end of more than was reserved.

    Raises:
        BadInputError: naming both counts.

    """
    reservation = instance.reservations.get(end.reservation_id)
    if reservation is not None and not 0 <= end.num_written <= len(reservation.hashes):
        raise BadInputError(
            "num_written", given=end.num_written, allowed=f"0 to {len(reservation.hashes)}"
        )


def _refuse_repeats(part: str, request_ids: Iterable[RequestId]) -> None:
    seen: set[RequestId] = set()
    for request_id in request_ids:
        if request_id in seen:
            raise BadInputError(f"a request is twice in {part}", given=request_id)
        seen.add(request_id)


def _check_load_result(instance: Instance, result: LoadResult) -> None:
    load = instance.loads.get(result.request_id)
    if load is None:
        return
    whole = result.num_computed_tokens % instance.block_tokens == 0
    if not instance.takes_partial_loads:
        whole = result.num_computed_tokens in (load.hit_tokens, load.asked_tokens)
    if not whole or not load.hit_tokens <= result.num_computed_tokens <= load.asked_tokens:
        raise BadInputError(
            f"load result of request {result.request_id} is not what was asked for",
            given=result.num_computed_tokens,
            allowed=f"{load.hit_tokens} to {load.asked_tokens}, in whole blocks of "
            f"{instance.block_tokens} tokens; of several groups, or one with a window, one or the "
            "other",
        )
    if result.failure is not None:
        _check_failure(instance, load, result.failure)


def _check_failure(instance: Instance, load: LoadInFlight, failure: LoadFailure) -> None:
    num_groups, num_blocks = len(instance.rules), load.asked_tokens // instance.block_tokens
    if not 0 <= failure.group_id < num_groups or not 0 <= failure.block < num_blocks:
        raise BadInputError(
            "a failure at a block that no load has asked for",
            given=f"block {failure.block} of group {failure.group_id}",
            allowed=f"blocks 0 to {num_blocks - 1} of groups 0 to {num_groups - 1}",
        )


def _check_progress(
    instance: Instance, progress: Progress, ended_loads: dict[RequestId, LoadResult]
) -> None:
    request = instance.requests.get(progress.request_id)
    if request is None:
        return
    who = f"progress of request {progress.request_id}"
    if progress.request_id in instance.loads and progress.request_id not in ended_loads:
        raise BadInputError(f"{who}: its load has not been reported")
    tables = instance.manager.block_table(progress.request_id)
    slots = min(len(table) for table in tables) * instance.block_tokens
    limit = min(slots, progress.num_tokens)
    in_place = request.num_computed_tokens
    if progress.request_id in instance.loads:
        in_place = ended_loads[progress.request_id].num_computed_tokens
    if not in_place <= progress.num_computed_tokens <= limit:
        raise BadInputError(
            f"{who}: num_computed_tokens",
            given=progress.num_computed_tokens,
            allowed=f"{in_place} to {limit} (slots {slots}, tokens {progress.num_tokens})",
        )
    check_num_hashes(
        instance, who, len(request.hashes) + len(progress.new_hashes), progress.num_tokens
    )
    if request.content is not None:
        num_told = len(request.content.tokens) + len(progress.new_tokens)
        check_num_told(who, num_told, progress.num_tokens)


def _check_admission(instance: Instance, ask: AdmitAsk) -> None:
    if not 1 <= ask.target_tokens <= ask.num_tokens:
        raise BadInputError(
            f"target_tokens of request {ask.request_id}",
            given=ask.target_tokens,
            allowed=f"1 to num_tokens = {ask.num_tokens}",
        )
    if not 0 <= ask.ahead_tokens <= ask.num_tokens:
        raise BadInputError(
            f"ahead_tokens of request {ask.request_id}",
            given=ask.ahead_tokens,
            allowed=f"0 to num_tokens = {ask.num_tokens}",
        )
    check_num_hashes(instance, f"request {ask.request_id}", len(ask.hashes), ask.num_tokens)
    if ask.content is not None:
        check_num_told(f"request {ask.request_id}", len(ask.content.tokens), ask.num_tokens)
    _check_target(instance, ask.request_id, ask.target_tokens)
    needed = instance.manager.max_blocks_held(ask.target_tokens)
    if needed > instance.num_usable_blocks:
        raise NeverFitsError(
            f"request {ask.request_id} can never fit the pool of {instance.info.instance_id}",
            given={"needed_blocks": needed, "have_blocks": instance.num_usable_blocks},
        )


def check_num_hashes(instance: Instance, who: str, num_hashes: int, num_tokens: int) -> None:
    """Refuse anything but one hash per full hash block of so many tokens.

    Raises:
        BadInputError: naming both numbers.

    """
    allowed = num_tokens // instance.hash_block_tokens
    if num_hashes != allowed:
        raise BadInputError(
            f"{who}: one hash per full hash block is needed",
            given={"hashes": num_hashes, "num_tokens": num_tokens},
            allowed=f"{allowed} hashes",
        )


def check_num_told(who: str, num_told: int, num_tokens: int) -> None:
    """Refuse a content that does not hold every token.

    Raises:
        BadInputError: naming both numbers.

    """
    if num_told != num_tokens:
        raise BadInputError(f"{who}: every token must be told", given=num_told, allowed=num_tokens)


def _check_target(instance: Instance, request_id: RequestId, target_tokens: int) -> None:
    if type(target_tokens) is not int or not 1 <= target_tokens <= instance.info.max_model_len:
        raise PromptTooLongError(
            f"target_tokens of request {request_id}",
            given=target_tokens,
            allowed=f"1 to max_model_len = {instance.info.max_model_len}",
        )
