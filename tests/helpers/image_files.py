"""The files that images are made of, read without a Docker engine."""

import os
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
ENTRYPOINT, PREFLIGHT = DOCKER / "entrypoint.sh", DOCKER / "preflight.py"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def stages() -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's stages: name -> (INSTRUCTION, rest of the line), those of its base stage first."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    text = text[text.index("FROM ") :]
    found: dict[str, list[tuple[str, str]]] = {}
    for line in re.sub(r"\\\n", "", text).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = list(found.get(base, []))
        elif instruction:
            found[name].append((instruction, rest.strip()))
    return found


def last(target: str, instruction: str) -> str:
    return [rest for name, rest in stages()[target] if name == instruction][-1]
