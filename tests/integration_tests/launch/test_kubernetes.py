"""The manifests, against Kubernetes' and KubeRay's schemas, the server and its image."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from langchain_art_server.__main__ import cli as server_cli
from langchain_art_server.config import Settings, VllmSettings, load_settings
from langchain_art_server.gateway.request_watch import PROBES
from tests.cuda.test_container import owned
from tests.support.environments import kubernetes_python
from tests.support.live_server import REPO

FOLDER = REPO / "server/deploy/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
IMAGE = (REPO / "server/Dockerfile").read_text()
RAY_JOB = json.loads(Path(__file__).with_name("rayjob_schema.json").read_text())
#: Seconds that the engines have to end after what ran was cut.
CLOSING = 30


def documents(name: str) -> dict[str, dict[str, Any]]:
    found = list(yaml.safe_load_all((FOLDER / name).read_text()))
    return {one["kind"]: one for one in found}


def settings(name: str, folder: Path) -> Settings:
    file = folder / "server.toml"
    file.write_text(documents(name)["ConfigMap"]["data"]["server.toml"])
    return load_settings(file)


def templates(name: str) -> list[dict[str, Any]]:
    found = documents(name)
    if name == "server.yaml":
        return [found["StatefulSet"]["spec"]["template"]]
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [one["template"] for one in groups]


def refused(folder: Path, documents: list[dict[str, Any]]) -> str:
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    argv = [kubernetes_python(), "-m", "kubernetes_validate", "--strict", "-k", "1.37.0", file]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode or "WARN" not in done.stdout + done.stderr, "a kind without a schema"
    return done.stdout + done.stderr if done.returncode else ""


def pod_template(template: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "pods"}
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template}


def test_kubernetes_takes_them(tmp_path: Path) -> None:
    objects = [one for file in FILES for one in yaml.safe_load_all(file.read_text())]
    plain = [one for one in objects if "ray.io" not in one["apiVersion"]]
    pods = [pod_template(one) for file in FILES for one in templates(file.name)]
    assert len(plain) == 7 and len(pods) == 3
    assert refused(tmp_path, [*plain, *pods]) == ""
    pods[0]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    assert "readinesProbe" in refused(tmp_path, pods)


def test_kuberay_takes_its_job() -> None:
    job = documents("ray.yaml")["RayJob"]
    jsonschema.validate(job, RAY_JOB)
    job["spec"]["rayClusterSpec"]["workerGroups"] = []
    with pytest.raises(jsonschema.ValidationError, match="workerGroups"):
        jsonschema.validate(job, RAY_JOB)


def test_the_server_takes_their_settings(tmp_path: Path) -> None:
    for file in FILES:
        found = settings(file.name, tmp_path)
        assert isinstance(found.sampler, VllmSettings)
        pod = templates(file.name)[0]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= found.drain_seconds + CLOSING
        if job := documents(file.name).get("RayJob"):  # it has a GPU for each engine
            [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
            assert workers["replicas"] == found.sampler.replicas + 1


@pytest.mark.parametrize("name", [file.name for file in FILES])
def test_pods_are_what_the_image_is(name: str) -> None:
    [user] = re.findall(r"^USER (\d+)$", IMAGE, re.MULTILINE)
    folders = {*owned("Dockerfile"), "/dev/shm"}
    for template in templates(name):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user)
        for container in pod["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            mounts = [one for one in container["volumeMounts"] if not one.get("readOnly")]
            assert {one["mountPath"] for one in mounts} <= folders
    ports = [port for one in templates(name)[0]["spec"]["containers"] for port in one["ports"]]
    assert f"EXPOSE {next(p for p in ports if p['name'] == 'http')['containerPort']}\n" in IMAGE


def test_it_is_probed_where_it_answers_without_a_key() -> None:
    """Life and readiness apart: a server whose engine starts again is alive."""
    [container] = templates("server.yaml")[0]["spec"]["containers"]
    paths = {name: probe["httpGet"]["path"] for name, probe in container.items() if "Probe" in name}
    assert paths.pop("readinessProbe") == "/readyz"
    assert set(paths.values()) == {"/healthz"} and "startupProbe" in paths
    annotations = templates("server.yaml")[0]["metadata"]["annotations"]
    assert {"/healthz", "/readyz", annotations["prometheus.io/path"]} <= PROBES


def test_services_and_claims_are_there() -> None:
    for file in FILES:
        found = documents(file.name)
        selector = found["Service"]["spec"]["selector"]
        labels = templates(file.name)[0]["metadata"]["labels"] | {"ray.io/node-type": "head"}
        assert selector.items() <= labels.items()
        if policy := found.get("NetworkPolicy"):
            assert all(
                policy["spec"]["podSelector"]["matchLabels"].items()
                <= template["metadata"]["labels"].items()
                for template in templates(file.name)
            )
        for template in templates(file.name):
            for volume in template["spec"]["volumes"]:
                if "configMap" in volume:
                    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
                if claim := volume.get("persistentVolumeClaim"):
                    named = found["PersistentVolumeClaim"]["metadata"]["name"]
                    assert claim["claimName"] == named


def test_the_job_on_ray_is_a_command_of_the_server() -> None:
    words = documents("ray.yaml")["RayJob"]["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "langchain_art_server"]
    command = typer.main.get_command(server_cli)
    read = command.make_context("serve", words[3:]).params
    assert (read["ray"], str(read["config"])) == ("auto", "/config/server.toml")
    assert (read["host"], read["port"], str(read["data_dir"])) == ("0.0.0.0", 8000, "/data")
