"""What vLLM's configuration says of an engine, in kvferry's words."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cluster.connectors.facts import EngineFacts, travelling_layout
from kvferry.proto.credentials import DEFAULT_SERVER_NAME, Credentials
from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import Incarnation
from kvferry.proto.layout import Layout
from kvferry.proto.scheme import HashScheme
from kvferry.worker.model.config import rope_text
from kvferry.worker.model.folder import find_model_folder, model_name, weight_digest

# From this version on pcp computes only, and tokens are dealt over dcp alone.
_PCP_COMPUTES_SINCE = (0, 26)
_PREFIX = "ferry."


@dataclass(frozen=True, slots=True, kw_only=True)
class FerrySettings:
    """What `kv_connector_extra_config` says, each under `ferry.` and its name here.

    `address`: host:port of the front of any kvferry node, best the one on the same host; or
    `service`: the name of a service of the Ray cluster that this host belongs to.
    `weight_version`: names the weights; empty: a digest of their files is made at every start.
    `timeout_s`, `load_timeout_s`: for an answer of the service, and for a load. `staging_mib`: of
    host memory per rank. `bind`: where peers reach this rank; `insecure` as everywhere.
    `certificate`, `key`, `ca`, `token_file`, `server_name`: as `Credentials`.

    Raises:
        ConfigError: an unknown name, not just one of address and service, or a value of another
            kind.
    """

    address: str = ""
    service: str = ""
    weight_version: str = ""
    timeout_s: float = 2.0
    load_timeout_s: float = 30.0
    staging_mib: int = 128
    bind: str = "127.0.0.1"
    insecure: bool = False
    certificate: str | None = None
    key: str | None = None
    ca: str | None = None
    token_file: str | None = None
    server_name: str = DEFAULT_SERVER_NAME

    @classmethod
    def read(cls, extra: dict[str, Any]) -> "FerrySettings":
        """Return the settings in a connector's extra configuration; other names are not ours."""
        given = {
            name.removeprefix(_PREFIX): value
            for name, value in extra.items()
            if name.startswith(_PREFIX)
        }
        unknown = set(given) - set(cls.__dataclass_fields__)
        if unknown:
            raise ConfigError(
                "unknown names in kv_connector_extra_config",
                given=sorted(_PREFIX + name for name in unknown),
                allowed=[_PREFIX + name for name in cls.__dataclass_fields__],
            )
        if bool(given.get("address")) == bool(given.get("service")):
            raise ConfigError(
                "kv_connector_extra_config must say where kvferry is",
                given=sorted(extra),
                allowed="either ferry.address or ferry.service",
            )
        for name, value in given.items():
            _require_kind(name, value, cls.__dataclass_fields__[name].type)
        return cls(**given)

    def node_address(self) -> str:
        """Return the address of the front, asking Ray for it where a service is named.

        Raises:
            NotFoundError: the service has no node on this host.
            UnavailableError: there is no Ray cluster, or the node does not answer.
        """
        if self.address:
            return self.address
        from kvferry.cluster.ray_services import resolve_service

        return resolve_service(self.service)

    def credentials(self) -> Credentials | None:
        """Return the credentials, None where none are named.

        Raises:
            ConfigError: as `Credentials`.
        """
        paths = (self.certificate, self.key, self.ca, self.token_file)
        if not any(paths):
            return None
        certificate, key, ca, token_file = (None if path is None else Path(path) for path in paths)
        return Credentials(
            certificate=certificate,
            key=key,
            ca=ca,
            token_file=token_file,
            server_name=self.server_name,
        )


def _require_kind(name: str, value: object, kind: object) -> None:
    if kind is int:
        fits, allowed = type(value) is int and value > 0, "a positive integer"
    elif kind is float:
        fits = type(value) in (float, int) and 0 < value < math.inf  # type: ignore[operator]
        allowed = "a positive number"
    elif kind is bool:
        fits, allowed = type(value) is bool, "true or false"
    else:
        fits, allowed = isinstance(value, str), "a text"
    if not fits:
        raise ConfigError(f"{_PREFIX}{name} has a wrong value", given=repr(value), allowed=allowed)


def facts_of(
    vllm_config: Any,
    kv_cache_config: Any,
    scheme: HashScheme,
    settings: FerrySettings,
    version: str,
) -> EngineFacts:
    """Return the facts of an engine.

    Args:
        vllm_config: vLLM's.
        kv_cache_config: vLLM's.
        scheme: the service's.
        settings: the connector's.
        version: of vLLM.

    Raises:
        ConfigError: a cache that cannot be moved yet, or sizes that do not go together.
        ModelError: the model's files are not there, and no `ferry.weight_version` was given.
    """
    engine_id: str = vllm_config.kv_transfer_config.engine_id
    digest = hashlib.sha256(engine_id.encode()).digest()
    spec = _single_spec(kv_cache_config)
    engine = _layout(vllm_config, spec.block_size, version)
    return EngineFacts(
        engine_id=engine_id,
        # Every rank must say the same one. vLLM makes up another id at each start, unless told one.
        incarnation=Incarnation(1 + int.from_bytes(digest[:7], "big")),
        identity=_identity(vllm_config, spec, settings),
        scheme=scheme,
        layout=travelling_layout(engine, scheme.hash_block_tokens),
        engine_block_tokens=engine.virtual_block_tokens,
        version=f"vllm {version}",
    )


def _single_spec(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"]:
        raise ConfigError(
            "the connector moves models with one group of full attention only, so far",
            given=kinds,
            allowed=["FullAttentionSpec"],
        )
    spec = groups[0].kv_cache_spec
    head_size_v = getattr(spec, "head_size_v", None) or spec.head_size
    if head_size_v != spec.head_size:
        raise ConfigError(
            "keys and values must have one head size", given=head_size_v, allowed=spec.head_size
        )
    return spec


def _layout(vllm_config: Any, block_tokens: int, version: str) -> Layout:
    parallel = vllm_config.parallel_config
    numbers = tuple(int(part) for part in version.split(".")[:2])
    return Layout(
        block_tokens=block_tokens,
        kind="vllm",
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=getattr(parallel, "prefill_context_parallel_size", 1),
        dcp=getattr(parallel, "decode_context_parallel_size", 1),
        interleave=getattr(parallel, "cp_kv_cache_interleave_size", 1) or 1,
        profile="0.32" if numbers >= _PCP_COMPUTES_SINCE else "0.17",
        stage_layers=_stage_layers(vllm_config),
    )


def _stage_layers(vllm_config: Any) -> tuple[int, ...]:
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return ()
    from vllm.distributed.utils import get_pp_indices

    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    ends = [get_pp_indices(num_layers, stage, num_stages) for stage in range(num_stages)]
    return tuple(end - start for start, end in ends)


def _identity(vllm_config: Any, spec: Any, settings: FerrySettings) -> Identity:
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    num_layers = model.hf_text_config.num_hidden_layers
    return Identity(
        model=model_name(model.model, Path(model.model).expanduser()),
        weight_version=settings.weight_version or weight_digest(find_model_folder(model.model)),
        weight_dtype=f"{dtype}+{model.quantization}" if model.quantization else dtype,
        kv_dtype=str(spec.dtype).removeprefix("torch."),
        kv_scales="",
        rope=rope_text(model.hf_text_config),
        num_layers=num_layers,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=spec.head_size,
        groups=(GroupSpec(kind="full", layers=tuple(range(num_layers))),),
    )
