"""Where a model's files lie, and a digest of its weights."""

import re
from pathlib import Path

import xxhash

from kvferry.proto.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
_READ_BYTES = 1 << 20


def find_model_folder(path_or_hub_id: str) -> Path:
    """Return the local folder of a model, fetching it from the Hugging Face hub when it is an id.

    Args:
        path_or_hub_id: a folder, or a hub id of the form owner/name.

    Raises:
        ModelError: there is no such folder, the hub does not give it, or it lacks config.json.
    """
    folder = Path(path_or_hub_id).expanduser()
    # An empty text would mean the working directory.
    if not path_or_hub_id or not folder.is_dir():
        if not _HUB_ID.fullmatch(path_or_hub_id):
            raise ModelError(
                "no such model",
                given=path_or_hub_id,
                allowed="an existing folder, or a Hugging Face id of the form owner/name",
            )
        folder = _fetch_from_hub(path_or_hub_id)
    if not (folder / "config.json").is_file():
        raise ModelError(
            "not a model folder: it has no config.json",
            given=path_or_hub_id,
            allowed="a folder in Hugging Face form: config.json, *.safetensors and a tokenizer",
        )
    return folder


def model_name(path_or_hub_id: str, folder: Path) -> str:
    """Return the name of a model that is the same on every machine: hub id or folder name."""
    return folder.resolve().name if Path(path_or_hub_id).expanduser().is_dir() else path_or_hub_id


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, sorted by name.

    Raises:
        ModelError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "the model folder holds no weights", given=str(folder), allowed="*.safetensors"
        )
    return files


def weight_digest(folder: Path) -> str:
    """Return the xxh3-128 digest, in hex, of the weight files' lengths and content.

    Raises:
        ModelError: there are no weight files.
    """
    digest = xxhash.xxh3_128()
    for file in weight_files(folder):
        # The length keeps one file's end and the next one's start apart.
        digest.update(file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _fetch_from_hub(hub_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # Subfolders hold other forms of the same weights (original/, onnx/).
        folder = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]
        )
    # LocalEntryNotFoundError (offline, nothing in the cache) is an OSError; HTTP library errors of
    # an offline machine are wrapped into it.
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            "neither a folder nor a model that the Hugging Face hub gives us"
            f" ({type(error).__name__}: {str(error).strip().splitlines()[0]})",
            given=hub_id,
            allowed="an existing folder, or the id of a public (or already cached) hub model",
        ) from error
    return Path(folder)
