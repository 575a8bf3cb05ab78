"""The files of deploy/ say what their README says; nothing here runs a container."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


@pytest.fixture(name="job", scope="module")
def read_job() -> dict[str, Any]:
    """Return the only document of the manifest."""
    (job,) = yaml.safe_load_all((ROOT / "deploy" / "k8s" / "rayjob.yaml").read_text())
    assert isinstance(job, dict)
    return job


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of the head, the only one."""
    cluster = job["spec"]["rayClusterSpec"]
    assert "workerGroupSpecs" not in cluster
    spec = cluster["headGroupSpec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def dockerfile_instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, continuation lines joined, comments dropped."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def test_the_manifest_is_a_ray_job_that_runs_the_demo(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["entrypoint"] == "kvferry demo --address auto"
    assert job["spec"]["shutdownAfterJobFinishes"] is True


def test_the_manifest_runs_the_pinned_ray(job: dict[str, Any]) -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']}" in pins


def test_the_pod_asks_for_what_it_may_use(job: dict[str, Any]) -> None:
    (container,) = pod_of(job)["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}


def test_shared_memory_is_larger_than_the_object_store(job: dict[str, Any]) -> None:
    pod = pod_of(job)
    (container,) = pod["containers"]
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert int(head["rayStartParams"]["object-store-memory"]) < 1 << 30


def test_the_pod_outlives_the_stop_of_its_job(job: dict[str, Any]) -> None:
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert variables["PYTHONHASHSEED"] == "0"
    wait_s = int(variables["RAY_JOB_STOP_WAIT_TIME_S"])
    assert 3 < wait_s < pod_of(job)["terminationGracePeriodSeconds"]


def test_nothing_runs_as_root(job: dict[str, Any]) -> None:
    context = pod_of(job)["securityContext"]
    assert context["runAsNonRoot"] is True
    users = [arguments for name, arguments in dockerfile_instructions() if name == "USER"]
    assert users == [str(context["runAsUser"])]


def test_the_image_starts_from_the_tested_python_and_copies_files_that_exist() -> None:
    instructions = dockerfile_instructions()
    assert instructions[0] == ("FROM", "python:3.11-slim")
    copied = [
        source
        for name, arguments in instructions
        if name == "COPY"
        for source in arguments.split()[:-1]
    ]
    assert {"constraints.txt", "pyproject.toml", "proto", "coordinator", "worker", "cluster"} <= (
        set(copied)
    )
    for source in copied:
        assert (ROOT / source).exists(), source


def test_every_install_in_the_image_is_pinned() -> None:
    installs = [
        arguments
        for name, arguments in dockerfile_instructions()
        if name == "RUN" and "pip install" in arguments
    ]
    assert len(installs) == 2
    for arguments in installs:
        assert "-c constraints.txt" in arguments
