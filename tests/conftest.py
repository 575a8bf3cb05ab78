"""Fixtures shared by all levels, and the wall between unit tests and Ray."""

import os
from pathlib import Path

import pytest
from tests.tiny_models import save_tiny_hybrid, save_tiny_llama

# A parent's settings must not decide what a test sees.
os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("GRPC_VERBOSITY", "error")

UNIT = Path(__file__).parent / "unit"


@pytest.fixture(autouse=True)
def _no_ray_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit test that starts Ray is in the wrong folder."""
    if UNIT in request.path.parents:

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("unit tests run without Ray")

        monkeypatch.setattr("ray.init", refuse)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 of random weights, with sliding-window and full-attention layers."""
    folder = tmp_path_factory.mktemp("model") / "tiny-hybrid"
    save_tiny_hybrid(folder)
    return folder
