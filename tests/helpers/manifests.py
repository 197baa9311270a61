"""The manifests of deploy/kubernetes."""

from pathlib import Path
from typing import Any

import yaml

TOP = Path(__file__).parents[2]
FOLDER = TOP / "deploy" / "kubernetes"


def documents() -> list[tuple[Path, dict[str, Any]]]:
    """Every object of the folder, and the file that it is in; kustomize's files and the adapter's values
    apart."""
    files = [
        p
        for p in sorted(FOLDER.rglob("*.yaml"))
        if p.name not in ("kustomization.yaml", "prometheus-adapter-values.yaml")
    ]
    return [(p, d) for p in files for d in yaml.safe_load_all(p.read_text())]


def one(kind: str, folder: str = "") -> dict[str, Any]:
    """The one of a folder, or of all but those of a model over several hosts (test_hosts.py)."""
    known = ((p.parent.name, d) for p, d in documents() if d["kind"] == kind)
    (found,) = [d for name, d in known if name == folder or (not folder and name != "hosts")]
    return found
