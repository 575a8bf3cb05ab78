"""Environment variables: of the driver, which Ray reads when it is imported, and of actors."""

import os
import secrets

from kvferry.proto.credentials import Credentials


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


def of_actor(
    *, hash_seed: str, threads: int, credentials: Credentials | None
) -> dict[str, dict[str, str]]:
    """Return the runtime environment of an actor.

    Args:
        hash_seed: text of PYTHONHASHSEED.
        threads: that the process may compute with.
        credentials: of the service.
    """
    # PYTHONHASHSEED must be there before the interpreter starts. OpenMP threads of several
    # processes spin against each other, so each rank gets its share of the cores.
    variables = {
        "PYTHONHASHSEED": hash_seed,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if credentials is not None and "GRPC_VERBOSITY" not in os.environ:
        # Nobody but gRPC hears why a server refused a handshake, and it says so from info on.
        variables["GRPC_VERBOSITY"] = "info"
    return {"env_vars": variables}
