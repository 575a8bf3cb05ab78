"""When a process counts as frozen."""

from kvferry.cluster.canary import FROZEN_AFTER_TURNS, Canary


def test_who_has_never_answered_is_starting() -> None:
    canary = Canary()
    assert not any(canary.is_frozen() for _ in range(1000))
    serving = Canary(has_answered=True)
    assert [serving.is_frozen() for _ in range(10)] == [False] * 9 + [True]


def test_who_answered_once_is_frozen_after_ten_turns_without_another_answer() -> None:
    canary = Canary()
    for _ in range(2):
        canary.answered()
        assert [canary.is_frozen() for _ in range(10)] == [False] * 9 + [True]
    assert FROZEN_AFTER_TURNS == 10
