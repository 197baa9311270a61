"""Builds the images with buildah, which needs neither a daemon nor BuildKit: `make image`.

    python docker/build_image.py slim cpu                       # from the base that the Dockerfile names, of
                                                                # its registry
    python docker/build_image.py slim --base-from-host          # from a base of this Debian host's packages,
                                                                # without a registry
    python docker/build_image.py slim --storage build/images    # where images lie: buildah --root
                                                                # build/images/root images

Steps run in a chroot, as root, and see the pip configuration, certificates and local package folders of this
host. So an image is built wherever `pip install` works. What is built is for trials: images that are
published are built from a pinned base.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).parent.parent
DOCKERFILE = TOP / "docker" / "Dockerfile"
TARGETS = ("slim", "cpu")
_PACKAGES = "python3,python3-dev,python3-venv,python3-pip,ca-certificates"
_HOST_BASE = "localhost/tableside-base:host"


class Buildah:
    """buildah with images in a folder of ours. environment: what its commands run with."""

    def __init__(self, storage: Path) -> None:
        if shutil.which("buildah") is None:
            raise SystemExit("buildah is missing; Debian: apt-get install buildah")
        self._at = [
            "--root",
            str(storage / "root"),
            "--runroot",
            str(storage / "run"),
            "--storage-driver",
            "vfs",
        ]
        self.environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}

    def command(self, *arguments: str) -> list[str]:
        return ["buildah", arguments[0], *self._at, *arguments[1:]]

    def run(self, *arguments: str) -> str:
        """Runs buildah; what it says on stdout. SystemExit: it failed, and has said why on stderr."""
        done = subprocess.run(
            self.command(*arguments), stdout=subprocess.PIPE, text=True, env=self.environment, check=False
        )
        if done.returncode:
            raise SystemExit(f"buildah {arguments[0]} ended with {done.returncode}")
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        command = self.command("inspect", "--type", "image", image)
        return subprocess.run(command, capture_output=True, env=self.environment, check=False).returncode == 0

    def size_bytes(self, image: str) -> int:
        """Bytes of an image's files, as they lie unpacked."""
        container = self.run("from", "--pull-never", image)
        try:
            mounted = self.run("mount", container)
            out = subprocess.run(
                ["du", "-sxb", mounted], stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            return int(out.split()[0])
        finally:
            self.run("rm", container)


def base_from_host(buildah: Buildah) -> str:
    """A base with Debian's own Python, made of the packages that this host's apt installs; the image's
    name."""
    if buildah.has(_HOST_BASE):
        return _HOST_BASE
    sources = [
        p
        for p in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*.sources"))
        if p.is_file()
    ]
    if shutil.which("mmdebstrap") is None or not sources:
        raise SystemExit("--base-from-host needs a Debian host with mmdebstrap; apt-get install mmdebstrap")
    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder) / "base.tar"
        tidy = '--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/usr/share/doc/*'
        command = [
            "mmdebstrap",
            "--variant=minbase",
            f"--include={_PACKAGES}",
            tidy,
            "",
            str(tar),
            *map(str, sources),
        ]
        subprocess.run(command, check=True)
        container = buildah.run("from", "scratch")
        buildah.run("add", container, str(tar), "/")
    for setting in (
        "PIP_BREAK_SYSTEM_PACKAGES=1",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ):
        buildah.run("config", "--env", setting, container)
    buildah.run("commit", "--rm", container, _HOST_BASE)
    return _HOST_BASE


def pip_volumes() -> list[str]:
    """What the steps see of this host, so that pip finds there what it finds here: configuration,
    certificates, folders."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=False
    ).stdout
    files = re.findall(r"^\s+(/\S+), exists: True$", listed, re.MULTILINE)
    values = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    folders = [f for f in re.findall(r"(?:file:/{2}|(?<=['\s]))(/[^'\s]+)", values) if os.path.exists(f)]
    tops = {str(Path(*Path(f).parts[:3])) for f in folders if not f.startswith("/etc/")}
    volumes = [f"{f}:/etc/pip.conf:ro" for f in files[-1:]] + [f"{t}:{t}:ro" for t in sorted(tops)]
    certificates = "/etc/ssl/certs/ca-certificates.crt"
    return [*volumes, f"{certificates}:{certificates}:ro"] if os.path.exists(certificates) else volumes


def build(buildah: Buildah, target: str, base: str | None) -> str:
    """Builds one target; the image's name."""
    name = f"localhost/tableside:{target}"
    index = os.environ.get("PIP_EXTRA_INDEX_URL", "")
    options = [f"--volume={v}" for v in pip_volumes()] + [f"--build-arg=PIP_EXTRA_INDEX_URL={index}"]
    if base is not None:
        options += [f"--build-arg=PYTHON_IMAGE={base}", "--pull-never"]
    ignored = [
        "--ignorefile",
        str(DOCKERFILE) + ".dockerignore",
        "--format",
        "docker",
    ]  # the format that has HEALTHCHECK
    buildah.run(
        "bud",
        "--layers",
        "--target",
        target,
        "--file",
        str(DOCKERFILE),
        *ignored,
        "--tag",
        name,
        *options,
        str(TOP),
    )
    return name


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument(
        "targets", nargs="*", default=list(TARGETS), help="stages of docker/Dockerfile (default: %(default)s)"
    )
    p.add_argument(
        "--base-from-host", action="store_true", help="make the base of this Debian host's packages"
    )
    p.add_argument(
        "--storage",
        type=Path,
        default=TOP / "build" / "images",
        help="folder of the images (default: %(default)s)",
    )
    options = p.parse_args()
    buildah = Buildah(options.storage)
    base = base_from_host(buildah) if options.base_from_host else None
    if base is not None:
        print(f"{base}: {buildah.size_bytes(base) / 1e6:,.0f} MB")
    for target in options.targets:
        image = build(buildah, target, base)
        print(f"{image}: {buildah.size_bytes(image) / 1e6:,.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
