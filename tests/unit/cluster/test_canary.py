"""When a process counts as frozen."""

from kvferry.cluster.canary import Canary


def test_who_has_never_answered_may_be_starting_for_two_minutes() -> None:
    canary = Canary()
    assert [canary.is_frozen() for _ in range(120)] == [False] * 119 + [True]


def test_who_serves_already_is_known_to_have_started() -> None:
    canary = Canary(has_answered=True)
    assert [canary.is_frozen() for _ in range(10)] == [False] * 9 + [True]


def test_who_answered_once_is_frozen_after_ten_turns_without_another_answer() -> None:
    canary = Canary()
    for _ in range(2):
        canary.answered()
        assert [canary.is_frozen() for _ in range(10)] == [False] * 9 + [True]


def test_who_has_ended_may_be_starting_anew_for_two_minutes() -> None:
    canary = Canary(has_answered=True)
    assert not canary.is_frozen()
    canary.ended()
    assert [canary.is_frozen() for _ in range(120)] == [False] * 119 + [True]
    canary.answered()
    assert [canary.is_frozen() for _ in range(10)] == [False] * 9 + [True]
