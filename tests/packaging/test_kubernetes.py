"""deploy/kubernetes, rendered by kubectl's kustomize: every object under the schema of Kubernetes, and in itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.packaging.compose import ROOT
from worker_agent.configuration import configure

FOLDER = ROOT / "deploy" / "kubernetes"
KUBECTL = Path(sys.prefix) / "bin" / "kubectl"
VERSION = "1.32"
"""Old enough for most clusters: what it knows, later ones know."""
FOREIGN = {"ServiceMonitor"}
"""Of the Prometheus operator, not of Kubernetes."""
PLAIN_USER = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}


def rendered(name: str) -> list[dict[str, Any]]:
    """The objects of a kustomization. An unknown field in it is an error of kubectl's."""
    done = subprocess.run(
        [KUBECTL, "kustomize", FOLDER / name], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower()
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """The example overlay, which has everything, by kind and name."""
    return {(found["kind"], found["metadata"]["name"]): found for found in rendered("example")}


def pods(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates by the name of what makes them."""
    return {name: found["spec"]["template"] for (_, name), found in objects.items() if "template" in found["spec"]}


@pytest.fixture(scope="module")
def templates(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return pods({key: found for key, found in objects.items() if "spec" in found})


@pytest.mark.parametrize("name", ["base", "workers", "example"])
def test_every_object_is_valid_under_the_schema_of_kubernetes(name: str) -> None:
    found = rendered(name)

    assert found
    for thing in found:
        if thing["kind"] not in FOREIGN:
            kubernetes_validate.validate(thing, VERSION, strict=True)


def test_an_unknown_field_would_be_found(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    wrong = objects["Service", "coordinator"] | {"specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_no_object_holds_a_secret_and_those_that_are_named_are_documented(
    objects: dict[tuple[str, str], dict[str, Any]], templates: dict[str, dict[str, Any]]
) -> None:
    assert not [key for key in objects if key[0] == "Secret"]
    named = {
        volume["secret"]["secretName"]
        for template in templates.values()
        for volume in template["spec"]["volumes"]
        if "secret" in volume
    }
    named |= {
        endpoint["authorization"]["credentials"]["name"]
        for endpoint in objects["ServiceMonitor", "coordinator"]["spec"]["endpoints"]
    }
    page = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    assert named == {"coordinator", "worker-tokens", "coordinator-metrics"}
    assert all(f"create secret generic {name} " in page for name in named)


def test_every_pod_is_a_plain_user_s_on_a_root_that_cannot_be_written_to(templates: dict[str, dict[str, Any]]) -> None:
    assert templates.keys() == {"coordinator", "coordinator-migrate-0-1-0", "worker"}
    for name, template in templates.items():
        spec = template["spec"]
        assert spec["securityContext"].items() >= PLAIN_USER.items(), name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False), name
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= container["resources"].keys(), name
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, name
        volumes = {volume["name"] for volume in spec["volumes"]} | ({"data"} if name == "worker" else set())
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes, name


def test_selectors_ports_and_budgets_meet_the_pods(
    objects: dict[tuple[str, str], dict[str, Any]], templates: dict[str, dict[str, Any]]
) -> None:
    deployment = objects["Deployment", "coordinator"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    selectors = [
        deployment["selector"]["matchLabels"],
        objects["PodDisruptionBudget", "coordinator"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy", "coordinator"]["spec"]["podSelector"]["matchLabels"],
        objects["Service", "coordinator"]["spec"]["selector"],
        deployment["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert deployment["replicas"] >= 2
    monitor = objects["ServiceMonitor", "coordinator"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= objects["Service", "coordinator"]["metadata"]["labels"].items()
    (container,) = deployment["template"]["spec"]["containers"]
    (port,) = container["ports"]
    probes = [container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [(probe["path"], probe["port"]) for probe in probes] == [
        ("/healthz", port["name"]),
        ("/healthz", port["name"]),
        ("/readyz", port["name"]),
    ]
    # A client of the coordinator is one whom its policy lets in.
    (allowed,) = objects["NetworkPolicy", "coordinator"]["spec"]["ingress"][0]["from"]
    assert allowed["podSelector"]["matchLabels"].items() <= templates["worker"]["metadata"]["labels"].items()


def test_the_patches_of_the_example_all_arrive(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert len(objects["NetworkPolicy", "coordinator"]["spec"]["ingress"]) == 3
    assert objects["PersistentVolumeClaim", "coordinator-artifacts"]["spec"]["storageClassName"] == "shared"
    assert {found["metadata"]["namespace"] for found in objects.values()} == {"rollouts"}


def test_the_migration_is_named_after_the_release_and_all_images_are_of_it(
    templates: dict[str, dict[str, Any]],
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"coordinator-migrate-{project['version'].replace('.', '-')}" in templates
    for template in templates.values():
        assert template["spec"]["containers"][0]["image"].endswith(f":{project['version']}")


def test_each_worker_has_its_own_token_and_settings_that_the_agent_takes(
    objects: dict[tuple[str, str], dict[str, Any]], templates: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    (container,) = templates["worker"]["spec"]["containers"]
    (token,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tokens"]
    (identity,) = container["env"]
    assert token["subPathExpr"] == f"$({identity['name']})"
    assert identity["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"

    (settings,) = [found for (kind, _), found in objects.items() if kind == "ConfigMap"]
    file = tmp_path / "worker.yaml"
    file.write_text(settings["data"]["worker.yaml"])
    taken = configure(file, {"WORKER_ID": "worker-0"}, {}).settings
    assert (taken.token_file, taken.worker_id) == (Path(token["mountPath"]), "worker-0")
    assert taken.metrics_port == container["ports"][0]["containerPort"]
    assert str(taken.data) in {mount["mountPath"] for mount in container["volumeMounts"]}
