"""`python -m campaigns.claims.build FILE...`: compiles the extensions of setup.py that these files belong to, in place.

They are compiled with little optimization: a trial needs them once. It runs at the top of a copy of the tree.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

FOLDER = Path("build/claims")


def build(files: Sequence[str]) -> None:
    """files: sources or headers, from the top of the tree. setuptools' errors: a source does not compile."""
    os.environ["TABLESIDE_NATIVE"] = "required"
    import_module("setuptools")  # brings distutils
    distribution = import_module("distutils.core").run_setup("setup.py", stop_after="init")
    distribution.ext_modules = [e for e in distribution.ext_modules if {*e.sources, *e.depends} & {*files}]
    for extension in distribution.ext_modules:
        extension.extra_compile_args = [f for f in extension.extra_compile_args if not f.startswith("-O")] + ["-O1"]
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.force = str(FOLDER), True
    distribution.run_command("build_ext")
    for made in map(Path, command.get_outputs()):
        shutil.copy(made, made.relative_to(FOLDER / "tableside"))  # in a checkout the rooms lie at the top


if __name__ == "__main__":
    build(sys.argv[1:])
