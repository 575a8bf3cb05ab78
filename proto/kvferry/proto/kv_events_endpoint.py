"""Where KV events are published: what an endpoint's text means."""

from kvferry.proto.bind import require_safe_plain_bind
from kvferry.proto.errors import ConfigError

LOCAL_TRANSPORTS = ("ipc://", "inproc://")


def binds_by_vllm_rule(endpoint: str) -> bool:
    """Return whether vLLM's publisher listens at this endpoint rather than connecting to it.

    It listens at wildcards (`tcp://*:5557`, `tcp://127.0.0.1:*`), at IPv6 addresses with `::` and
    at endpoints of this machine (`ipc://`, `inproc://`).
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(LOCAL_TRANSPORTS)


def require_safe_endpoint(endpoint: str, insecure: bool) -> None:
    """Refuse to listen at an endpoint beyond this machine unless the operator said `insecure`.

    Raises:
        ConfigError: not `tcp://host:port`, `ipc://...` or `inproc://...`.
        InsecureBindError: the host is not loopback and `insecure` is False.
    """
    if not endpoint.startswith(LOCAL_TRANSPORTS):
        require_safe_plain_bind(_split_tcp(endpoint)[0], insecure)


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of one of several publishers that share a setting, as vLLM counts them.

    The port of `tcp://` grows by `rank` (one that the system chooses stays as it is), `inproc://`
    gets the suffix `_dp<rank>`.

    Raises:
        ConfigError: another transport with a rank above 0, or a port above 65,535.
    """
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    _, port = _split_tcp(endpoint)
    if port in ("*", "0"):
        return endpoint
    if not port.isdecimal() or int(port) + rank > 65_535:
        raise ConfigError(
            "no port for every rank", given=f"{endpoint} + {rank}", allowed="up to port 65535"
        )
    return f"{endpoint.removesuffix(port)}{int(port) + rank}"


def _split_tcp(endpoint: str) -> tuple[str, str]:
    """Return host (without brackets) and port."""
    host, separator, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not separator or not host or not port:
        raise ConfigError(
            "an endpoint that cannot be used",
            given=endpoint,
            allowed="tcp://host:port; ipc:// and inproc:// for one publisher on this machine",
        )
    return host.removeprefix("[").removesuffix("]"), port
