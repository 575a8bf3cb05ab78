"""A service with credentials on a real Ray cluster: every process finds the files by itself."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from tests.certificates import CertificateFolder

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.client import connect
from kvferry.cluster.config import ServiceConfig
from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.ray_launcher import RayService
from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.router import Router, RouterSettings, Served
from kvferry.proto.errors import CredentialsError
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.messages import Describe
from kvferry.worker.model.loading import inspect_model
from kvferry.worker.model.sampling import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(180)]


def served_once(service: RayService) -> Served:
    """Serve a prompt of 40 tokens, from prefill to decode."""

    async def once() -> Served:
        router = Router(
            coordinator=service.coordinator,
            engines={i.info.instance_id: i.link for i in service.instances},
            identity_digest=service.identity.digest(),
            scheme=service.scheme,
            settings=RouterSettings(request_timeout_s=30.0),
        )
        await router.start()
        try:
            request = EngineRequest(
                request_id=RequestId("secured"),
                prompt_token_ids=tuple(range(1, 41)),
                sampling=SamplingParams(max_tokens=3, ignore_eos=True),
            )
            return await router.serve(request)
        finally:
            await router.close()

    return asyncio.run(once())


def test_all_processes_of_a_service_with_credentials_speak_tls(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    files = CertificateFolder(tmp_path)
    credentials = files.mutual(token_file=files.token_file())
    config = ServiceConfig(model=str(tiny_model), num_decode=1, credentials=credentials)
    with (
        ray_cluster.connected("local", num_ranks=2, namespace=naming.new_namespace()),
        RayService(config, inspect_model(config.model).identity) as service,
    ):
        service.start(print)
        assert len(served_once(service).output_token_ids) == 3
        with connect(service.control_address, credentials=credentials) as ferry:
            stats = {i.info.instance_id: i.stats for i in ferry.describe().instances}
        assert stats[InstanceId("decode-0")].first.remote_hit == 32
        with (
            closing(ControlClient(service.control_address, timeout_s=10)) as client,
            pytest.raises(CredentialsError, match="speaks TLS and this client plaintext"),
        ):
            client.call(Describe())
