"""Environment variables that Ray reads when it is imported, so they come first."""

import os
import secrets


def prepare(address: str) -> None:
    """Set what a run needs before the first `import ray`; what the user has set stays.

    A cluster of our own asks for a token made for this run: Ray's processes listen beyond
    loopback, and anyone who reaches them could run code.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Of several ranks that fail to start, the first is told; Ray would print the others' traces.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address == "local" and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
