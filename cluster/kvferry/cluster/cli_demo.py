"""`kvferry demo`: options, and what is printed where."""

import contextlib
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from kvferry.cluster import ray_environment
from kvferry.cluster.byte_size import parse_bytes
from kvferry.cluster.cli_options import (
    AsJson,
    Bind,
    HashSeed,
    Insecure,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
    credentials_of,
)
from kvferry.cluster.config import DEFAULT_KV_SIZE, ServiceConfig
from kvferry.cluster.progress import stderr_progress
from kvferry.cluster.serving.pool_size import KvSize, LengthLimit
from kvferry.proto.credentials import DEFAULT_SERVER_NAME
from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout
from kvferry.proto.layout_text import DEFAULT_BLOCK_TOKENS, parse_layout
from kvferry.worker.model.sampling import SamplingParams

TABLE_COLUMNS = 124
EXAMPLES = """
Examples:

kvferry demo                                   the default: 9 requests, 1 prefill, 2 decode

kvferry demo --json > result.json              one JSON object on stdout

kvferry demo --model Qwen/Qwen2.5-0.5B-Instruct --num-blocks 400

kvferry demo --kv-bytes 512MiB                 pools of so many bytes

kvferry demo --memory-fraction 0.25 --max-model-len auto

kvferry demo --decode 1 --prefill-layout pcp=2 --decode-layout dcp=2,interleave=4

kvferry demo --address auto                    on the Ray cluster this runs in (a Ray job)

kvferry demo --tls-cert tls.crt --tls-key tls.key --tls-ca ca.crt --token-file token

                                               TLS with client certificates and a token
"""

Prefill = Annotated[int, typer.Option(help="Prefill instances.")]
Decode = Annotated[int, typer.Option(help="Decode instances.")]
BlockTokens = Annotated[
    int, typer.Option(help="Tokens per block on one rank, where a layout says none.")
]
PrefillLayout = Annotated[
    str,
    typer.Option(
        help="How the ranks of a prefill instance share tokens, e.g. pcp=2 or "
        "dcp=2,interleave=4,block_tokens=16; by default it has one rank."
    ),
]
DecodeLayout = Annotated[str, typer.Option(help="The same of a decode instance.")]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        help="Blocks on each rank, the null block included; "
        f"{DEFAULT_KV_SIZE.num_blocks} where nothing else sizes the pool."
    ),
]
KvBytes = Annotated[
    str | None,
    typer.Option(help="Instead: bytes on each rank for the KV cache, such as 512MiB or 2GB."),
]
MemoryFraction = Annotated[
    float | None,
    typer.Option(
        help="Instead: fraction of the device's memory that one rank may take, model included."
    ),
]
MaxModelLen = Annotated[
    str | None,
    typer.Option(
        help="Most tokens of a request, or auto: the longest that fits the pool. By default the "
        "model's limit."
    ),
]
Requests = Annotated[int, typer.Option(help="Requests, over 3 sessions.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens generated per request.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="Local folder or hub id of a Llama, Qwen2, Qwen3 or Gemma 3 model; by default "
        "SmolLM2-135M-Instruct, downloaded once."
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Sampling seed; matters above temperature 0.")]
Address = Annotated[str, typer.Option(help="Ray cluster: local (start one), auto, or host:port.")]
Port = Annotated[int, typer.Option(help="Port of the control front; 0 takes a free one.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Serve Prometheus metrics: the coordinator's, which list those of all ranks, on this "
        "port (0 takes a free one)."
    ),
]
Reflection = Annotated[
    bool, typer.Option("--reflection", help="Tell clients of the gRPC services and messages.")
]


def demo(
    *,
    prefill: Prefill = 1,
    decode: Decode = 2,
    block_tokens: BlockTokens = DEFAULT_BLOCK_TOKENS,
    prefill_layout: PrefillLayout = "",
    decode_layout: DecodeLayout = "",
    num_blocks: NumBlocks = None,
    kv_bytes: KvBytes = None,
    memory_fraction: MemoryFraction = None,
    max_model_len: MaxModelLen = None,
    requests: Requests = 9,
    max_tokens: MaxTokens = 24,
    model: Model = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    hash_seed: HashSeed = "0",
    address: Address = "local",
    bind: Bind = "127.0.0.1",
    port: Port = 0,
    metrics_port: MetricsPort = None,
    insecure: Insecure = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_name: TlsName = DEFAULT_SERVER_NAME,
    token_file: TokenFile = None,
    reflection: Reflection = False,
    as_json: AsJson = False,
) -> int:
    """Serve a multi-turn conversation with prefill/decode disaggregation and check every output.

    Starts a local Ray cluster with a coordinator, prefill and decode instances, serves several
    sessions over one long document, compares every output with plain transformers, stops Ray.
    """
    # Settings first: a wrong one is told before anything is downloaded.
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    config = ServiceConfig(
        model=model or "",
        num_prefill=prefill,
        num_decode=decode,
        prefill_layout=_layout("--prefill-layout", prefill_layout, block_tokens),
        decode_layout=_layout("--decode-layout", decode_layout, block_tokens),
        kv_size=_kv_size(num_blocks, kv_bytes, memory_fraction),
        max_model_len=_length_limit(max_model_len),
        hash_seed=hash_seed,
        ray_address=address,
        bind=bind,
        port=port,
        metrics_port=metrics_port,
        insecure=insecure,
        credentials=credentials_of(tls_cert, tls_key, tls_ca, tls_name, token_file),
        reflection=reflection,
    )
    if requests < 1:
        raise ConfigError("--requests is too small", given=requests, allowed=">= 1")
    return _run(config, sampling, requests, as_json=as_json)


def _kv_size(num_blocks: int | None, kv_bytes: str | None, memory_fraction: float | None) -> KvSize:
    if num_blocks is None and kv_bytes is None and memory_fraction is None:
        return DEFAULT_KV_SIZE
    return KvSize(
        num_blocks=num_blocks,
        kv_bytes=None if kv_bytes is None else parse_bytes(kv_bytes),
        memory_fraction=memory_fraction,
    )


def _layout(option: str, text: str, block_tokens: int) -> Layout:
    try:
        return parse_layout(text, block_tokens=block_tokens)
    except ConfigError as error:
        raise ConfigError(
            f"{option}: {error.message}", given=error.given, allowed=error.allowed
        ) from None


def _length_limit(text: str | None) -> LengthLimit:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            "not a number of tokens", given=text, allowed="an integer >= 1, or auto"
        ) from None


def _run(
    config: ServiceConfig, sampling: SamplingParams, num_requests: int, *, as_json: bool
) -> int:
    ray_environment.prepare(config.ray_address)
    # Only now what imports Ray, and takes seconds to import.
    from kvferry.cluster.demo.report import print_table, to_json
    from kvferry.cluster.demo.run import DemoSettings, run_demo
    from kvferry.worker.model.demo_model import ensure_demo_model

    progress = stderr_progress()
    # Ray tells of dead workers on stdout, which belongs to the results.
    with contextlib.redirect_stdout(sys.stderr):
        if not config.model:
            config = config.with_model(str(ensure_demo_model(progress=progress)))
        settings = DemoSettings(num_requests=num_requests, sampling=sampling)
        result = run_demo(config, settings, progress)
    if as_json:
        print(json.dumps(to_json(result)))
    else:
        out = Console(file=sys.stdout, highlight=False)
        out.width = max(out.width, TABLE_COLUMNS)
        print_table(result, out)
    return 0 if result.ok else 1
