r"""A small proxy over vLLM servers that prefill and vLLM servers that decode.

    python -m examples.pd_proxy --prefill http://127.0.0.1:8100 \
        --decode http://127.0.0.1:8200 --decode http://127.0.0.1:8201 --port 8000

Serves /v1/completions, /v1/chat/completions, /v1/models and /health until interrupted.
"""

import argparse
import logging
import sys

from aiohttp import web
from examples.pd_proxy.proxy import Proxy, Settings

from kvferry.proto.bind import require_safe_plain_bind
from kvferry.proto.errors import InsecureBindError

SHUTDOWN_S = 5.0
"""Answers still on their way when the proxy is stopped have so long to end."""


def url(text: str) -> str:
    """Return a server's URL without a slash at its end."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL such as http://127.0.0.1:8100")
    return text.rstrip("/")


def positive(text: str) -> int:
    """Return a whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="pd_proxy", description="P/D over vLLM servers.")
    default = Settings()
    parser.add_argument(
        "--prefill", action="append", default=[], type=url, metavar="URL", help="repeat for several"
    )
    parser.add_argument(
        "--decode", action="append", required=True, type=url, metavar="URL", help="the same"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=positive, default=8000)
    parser.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine, in plaintext"
    )
    parser.add_argument(
        "--block-tokens",
        type=positive,
        default=default.block_tokens,
        help="prompts are compared in blocks of so many tokens",
    )
    parser.add_argument(
        "--min-prefill-blocks",
        type=positive,
        default=default.min_prefill_blocks,
        help="a prompt is prefilled if its decode server lacks so many full blocks of it",
    )
    return parser.parse_args()


def main() -> int:
    """Serve until interrupted; return the exit code."""
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        require_safe_plain_bind(args.host, args.insecure)
    except InsecureBindError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    settings = Settings(block_tokens=args.block_tokens, min_prefill_blocks=args.min_prefill_blocks)
    web.run_app(
        Proxy(args.prefill, args.decode, settings).app(),
        host=args.host,
        port=args.port,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_S,
        access_log=None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
