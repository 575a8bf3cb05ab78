"""Where the golden data are: this folder's, or those of KVFERRY_GOLDEN.

Another folder may hold any part of the files; whatever it holds is replayed.
"""

import os
from pathlib import Path

OWN_FOLDER = Path(__file__).parent / "data"
FOLDER = Path(os.environ.get("KVFERRY_GOLDEN") or OWN_FOLDER)
IS_OWN = FOLDER == OWN_FOLDER


def lines_of(name: str) -> list[str]:
    """Return the lines of a file; of one that another folder does not have, none.

    Raises:
        FileNotFoundError: the folder is not there, or is ours and lacks the file.
    """
    if not FOLDER.is_dir():
        raise FileNotFoundError(f"KVFERRY_GOLDEN names no folder: {FOLDER}")
    path = FOLDER / name
    return path.read_text().splitlines() if IS_OWN or path.exists() else []
