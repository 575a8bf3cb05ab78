"""What an engine's configuration may say of kvferry."""

from typing import Any

import pytest

from kvferry.cluster.connectors.vllm_facts import FerrySettings
from kvferry.proto.errors import ConfigError

ADDRESS = {"ferry.address": "127.0.0.1:7400"}


def test_settings_are_read_by_their_names_and_those_of_others_are_passed_over() -> None:
    extra = {**ADDRESS, "ferry.timeout_s": 1, "ferry.staging_mib": 64, "somebody.else": None}
    assert FerrySettings.read(extra) == FerrySettings(
        address="127.0.0.1:7400", timeout_s=1, staging_mib=64
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "must say where kvferry is"),
        ({"ferry.address": ""}, "must say where kvferry is"),
        ({**ADDRESS, "ferry.service": "kvferry"}, "must say where kvferry is"),
        ({**ADDRESS, "ferry.adress": "x"}, "unknown names.*ferry.adress"),
        ({**ADDRESS, "ferry.timeout_s": 0}, "timeout_s.*a positive number"),
        ({**ADDRESS, "ferry.load_timeout_s": float("inf")}, "load_timeout_s.*a positive number"),
        ({**ADDRESS, "ferry.timeout_s": float("nan")}, "timeout_s.*a positive number"),
        ({**ADDRESS, "ferry.staging_mib": 1.5}, "staging_mib.*a positive integer"),
        ({**ADDRESS, "ferry.insecure": 1}, "insecure.*true or false"),
        ({**ADDRESS, "ferry.ca": 7}, "ca.*a text"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FerrySettings.read(extra)
