"""Manifests beside the server: monitors, an autoscaler, network policies."""

import re
from collections.abc import Mapping
from typing import Any

import yaml
from manifests import TOP, documents, one

from tableside.serving.metrics.metrics import REQUESTS

# of an endpoint, in both kinds of monitors
ENDPOINT = {"port", "path", "interval", "scrapeTimeout", "scheme", "honorLabels", "relabelings"}


def test_a_service_monitor_has_what_its_reference_lists() -> None:
    """Of prometheus-operator's API reference, monitoring.coreos.com/v1: the fields that are used."""
    monitor = one("ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) <= {
        "selector",
        "endpoints",
        "namespaceSelector",
        "jobLabel",
        "targetLabels",
        "podTargetLabels",
    }
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(endpoint) <= ENDPOINT
    services = [d for _, d in documents() if d["kind"] == "Service"]
    assert len(services) == 3  # base/, and hosts/ of servers and of owners
    for service in services:
        assert is_selected(service["metadata"]["labels"], monitor)
        assert endpoint["port"] in [p["name"] for p in service["spec"]["ports"]]


def is_selected(labels: Mapping[str, str], monitor: Mapping[str, Any]) -> bool:
    """Whether a monitor means what has these labels."""
    (asked,) = monitor["spec"]["selector"]["matchExpressions"]
    assert asked["operator"] == "In"
    return labels.get(asked["key"]) in asked["values"]


def test_a_pod_monitor_finds_the_followers() -> None:
    """The same reference's fields; the follower's port, of pods that the selector means, and a job that the
    alert about followers looks for."""
    monitor = one("PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) <= {"selector", "podMetricsEndpoints", "namespaceSelector", "jobLabel"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert set(endpoint) <= ENDPOINT
    workloads = [(p.parent.name, d) for p, d in documents() if d["kind"] in ("Deployment", "StatefulSet")]
    followed = [d for folder, d in workloads if folder in ("base", "follow", "hosts")]
    assert len(followed) == 4
    for workload in followed:
        template = workload["spec"]["template"]
        assert "metadata" not in template or is_selected(template["metadata"]["labels"], monitor)
        for follower in (c for c in template["spec"]["containers"] if c["name"] == "follow"):
            (port,) = follower["ports"]
            assert endpoint["port"] == port["name"] == follower["livenessProbe"]["httpGet"]["port"]
            at = follower["command"][follower["command"].index("--metrics") + 1]
            assert at.endswith(f":{port['containerPort']}")
    alerts = yaml.safe_load((TOP / "deploy/prometheus/rules.yaml").read_text())["groups"][1]["rules"]
    (stuck,) = [a["expr"] for a in alerts if a["alert"] == "TablesideFollowerStuck"]
    (job,) = re.findall(r'up\{job=~"(.*?)"\}', stuck)
    assert re.fullmatch(job, f"default/{monitor['metadata']['name']}")


def test_keda_scales_as_the_autoscaler_does() -> None:
    """The fields are those of KEDA's reference, keda.sh/v1alpha1; the numbers those of autoscaling/."""
    scaled, scaler = one("ScaledObject"), one("HorizontalPodAutoscaler")["spec"]
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    spec = scaled["spec"]
    assert set(spec) <= {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"}
    assert spec["scaleTargetRef"] == scaler["scaleTargetRef"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (
        scaler["minReplicas"],
        scaler["maxReplicas"],
    )
    assert spec["advanced"] == {"horizontalPodAutoscalerConfig": {"behavior": scaler["behavior"]}}
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
    average = scaler["metrics"][0]["pods"]["target"]["averageValue"]
    assert trigger["metadata"]["threshold"] == average.replace("k", "000")
    (series,) = re.findall(r"rate\((\w+)\{", trigger["metadata"]["query"])
    assert series == REQUESTS.name


def test_policies_let_in_whoever_asks_and_no_others() -> None:
    """Each workload has one. Ports that it names are those of its containers, and each sender is named."""
    policies = {d["metadata"]["name"]: d["spec"] for _, d in documents() if d["kind"] == "NetworkPolicy"}
    workloads = {
        d["metadata"]["name"]: d["spec"]["template"]
        for p, d in documents()
        if d["kind"] in ("Deployment", "StatefulSet") and p.parent.name not in ("gpu", "follow")
    }
    assert policies.keys() == workloads.keys()
    followers = one("Deployment", "follow")["spec"]["template"]["spec"]["containers"]
    for name, policy in policies.items():
        template = workloads[name]
        assert policy["podSelector"]["matchLabels"] == template["metadata"]["labels"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        ports = {p["name"] for c in (*template["spec"]["containers"], *followers) for p in c.get("ports", ())}
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} <= ports
        assert all(rule["from"] for rule in policy["ingress"]) and all(
            rule["to"] for rule in policy["egress"]
        )
    servers = workloads["tableside"]["metadata"]["labels"]
    owners = [r for p in policies["tableside-owner"]["ingress"] for r in p["from"] if "podSelector" in r]
    assert [r["podSelector"]["matchLabels"] for r in owners] == [servers]
