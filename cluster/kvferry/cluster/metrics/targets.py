"""Where all metrics of a service are, as Prometheus discovers targets over HTTP."""

import json
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from kvferry.proto.bind import join_address
from kvferry.proto.messages import Description


def targets(description: Description, own_address: str) -> list[dict[str, Any]]:
    """Return the coordinator, at `own_address`, and every rank that serves metrics."""
    found: list[dict[str, Any]] = [_target(own_address, component="coordinator")]
    for status in description.instances:
        found += [
            _target(
                address,
                component="rank",
                instance_id=status.info.instance_id,
                role=status.info.role,
                rank=str(rank),
            )
            for rank, address in enumerate(status.info.rank_metrics)
        ]
    return found


def _target(address: str, **labels: str) -> dict[str, Any]:
    return {"targets": [address], "labels": labels}


def targets_page(describe: Callable[[], Description]) -> WSGIApplication:
    """Return a page that lists the targets; its own address is the one that it was asked at."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        bound = join_address(environ["SERVER_NAME"], int(environ["SERVER_PORT"]))
        body = json.dumps(targets(describe(), environ.get("HTTP_HOST", bound))).encode()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [body]

    return answer
