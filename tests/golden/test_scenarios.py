"""Replays every scenario that vLLM 0.17.1 and 0.32.0 recorded, step by step (FORMAT.md, section 1).

The folder is taken from KVFERRY_GOLDEN when set.
"""

import json

import pytest
from tests.golden.folder import IS_OWN, lines_of
from tests.golden.replay import Json, Replay, config_of, reason_of

from kvferry.proto.errors import ConfigError

FILES = {"0.17": "scenarios_017.jsonl", "0.32": "scenarios_032.jsonl"}
# How many scenarios our own folder has per profile; none of them is left out.
OWN_COUNTS = {"0.17": 84, "0.32": 93}


def scenarios(profile: str) -> list[Json]:
    return [json.loads(line) for line in lines_of(FILES[profile])]


SCENARIOS = [
    pytest.param(scenario, id=f"{profile}-{scenario['name']}")
    for profile in FILES
    for scenario in scenarios(profile)
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_step_of_a_recorded_scenario_gives_the_recorded_state(scenario: Json) -> None:
    if "refusal" in scenario:
        with pytest.raises(ConfigError) as caught:
            config_of(scenario)
        assert reason_of(caught.value) == scenario["refusal"]["reason"]
    else:
        replay = Replay(scenario)
        for step in scenario["steps"]:
            replay.run(step)
        assert replay.final() == scenario["final"]


@pytest.mark.parametrize("profile", FILES)
def test_no_recorded_scenario_is_left_out(profile: str) -> None:
    names = [param.id for param in SCENARIOS if str(param.id).startswith(f"{profile}-")]
    assert len(names) == len(scenarios(profile))
    if IS_OWN:
        assert len(names) == OWN_COUNTS[profile]
