"""The list of a node's engines, with the clock in the test's hands."""

from kvferry.cluster.engine_info import AttachedEngine, EngineInfo
from kvferry.cluster.engine_roll import FORGET_S, HEARTBEAT_S, EngineRoll
from kvferry.proto.layout import Layout


def engine(name: str) -> EngineInfo:
    return EngineInfo(engine_id=name, layout=Layout(block_tokens=16), version="1")


def test_an_engine_is_remembered_from_its_last_call_on_and_then_forgotten() -> None:
    roll = EngineRoll()
    roll.saw(engine("a"), b"one", 100.0)
    roll.saw(engine("b"), b"two", 100.0 + HEARTBEAT_S)
    assert roll.engines(100.0 + HEARTBEAT_S) == (
        AttachedEngine(engine=engine("a"), identity_digest=b"one", seen_s=HEARTBEAT_S),
        AttachedEngine(engine=engine("b"), identity_digest=b"two", seen_s=0.0),
    )
    roll.saw(engine("a"), b"three", 100.0 + FORGET_S)
    assert [one.identity_digest for one in roll.engines(111.0 + FORGET_S)] == [b"three"]
    assert roll.engines(101.0 + 2 * FORGET_S) == ()
