"""An engine's heart beats while its passes end, and not behind one that hangs."""

import threading
from collections.abc import Iterator

import pytest
from tests.builders import make_info
from tests.waiting import wait_until

from kvferry.cluster.serving import pulse as pulse_module
from kvferry.cluster.serving.pulse import Passes, PassWatch, Pulse
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import Command, Done, Heartbeat, Reply

INFO = make_info("d")


def test_a_pass_hangs_after_so_many_looks_and_is_dead_after_ten_more() -> None:
    watch = PassWatch(hangs_after=3)
    told = []
    for _ in range(15):
        watch.look(7)
        told.append((watch.hangs, watch.is_dead))
    assert told == [(False, False)] * 3 + [(True, False)] * 10 + [(True, True)] * 2
    watch.look(8)
    assert not watch.hangs


def test_passes_that_end_and_none_at_all_never_hang() -> None:
    watch = PassWatch(hangs_after=1)
    for present in (None, None, None, 1, 2, 3, None, 4):
        watch.look(present)
        assert not watch.hangs


def test_a_pass_is_present_until_it_ends_however_it_does() -> None:
    passes = Passes()

    def fail() -> None:
        with passes.one():
            assert passes.present == 1
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        fail()
    assert passes.present is None
    with passes.one():
        assert passes.present == 2


class Heart:
    """A pulse that beats every few milliseconds, and what it did."""

    def __init__(self) -> None:
        self.num_beats = 0
        self.is_dead = threading.Event()
        self.passes = Passes()
        self.pulse = Pulse(
            INFO,
            self,
            lambda: Epoch(1),
            passes=self.passes,
            hangs_after_s=5 * pulse_module.PULSE_S,
            on_death=self.is_dead.set,
        )

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        assert isinstance(command, Heartbeat)
        self.num_beats += 1
        return Done(changed=True)


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heart]:
    monkeypatch.setattr(pulse_module, "PULSE_S", 0.005)
    monkeypatch.setattr(pulse_module, "DEAD_AFTER_S", 0.05)
    made = Heart()
    made.pulse.start()
    yield made
    made.pulse.stop()


def test_it_stops_behind_a_pass_that_hangs_and_then_the_engine_is_given_up(heart: Heart) -> None:
    wait_until(lambda: heart.num_beats >= 20)
    assert not heart.is_dead.is_set()
    with heart.passes.one():
        before = heart.num_beats
        assert heart.is_dead.wait(20.0)
        # Looks 1 to 5 do not yet find that it hangs, and one may have been under way.
        assert heart.num_beats - before in {5, 6}
