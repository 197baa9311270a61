"""Runs a command with C extensions that watch themselves: gcc's address and undefined-behaviour sanitizers.

    python builder/sanitized.py COMMAND...

Every extension of setup.py is compiled with the sanitizers into build/sanitized, beside the built kernel and
not over it. The command's Python, and every Python that it starts, then imports those instead
(tests/fixtures/sanitized/sitecustomize.py). A read or write outside an object, a use after free, a signed
overflow, a bad shift, a misaligned access or the like ends the process at once. Its report goes to a file,
because pytest keeps what a process writes. All reports are printed at the end. The exit code is the
command's, or 1 where there is a report.

It needs gcc and the libraries of its sanitizers, which come with gcc on Debian.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

TOP = Path(__file__).parent.parent
FOLDER = TOP / "build" / "sanitized"
IMPORTED_FIRST = TOP / "tests" / "fixtures" / "sanitized"

SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
# -fno-wrapv: Python's own options for extensions define signed overflow, and then it would not be reported.
# -fno-var-tracking: eight minutes of compiling become one; reports keep their lines.
COMPILED_WITH = [*SANITIZERS, "-fno-wrapv", "-O1", "-g", "-fno-var-tracking", "-fno-omit-frame-pointer"]
# gcc 12 aligns the copies of stack frames, by which it detects uses after a return, to 32 bytes, and stores
# vectors of 64 bytes there as if they were aligned (its bug 110027). So the kernels, which have such vectors,
# go without them.
NO_COPIES_OF_FRAMES = ("--param", "asan-use-after-return=0")
RUNTIMES = ("libasan", "libubsan")
REMEDY = "Debian and Ubuntu: apt-get install gcc; Fedora: dnf install gcc libasan libubsan"

# detect_leaks: Python frees its modules' and types' memory at no exit, and each of those is reported as a
# leak. allocator_may_return_null: a request for too much memory is a MemoryError in Python, as without the
# sanitizer. alloc_dealloc_mismatch: libraries that are not compiled with the sanitizer mix new, delete,
# malloc and free among themselves.
ADDRESS_OPTIONS = (
    "detect_leaks=0:allocator_may_return_null=1:alloc_dealloc_mismatch=0:detect_stack_use_after_return=1"
)
UNDEFINED_OPTIONS = "print_stacktrace=1"


class Unavailable(Exception):
    """This machine cannot compile or run with the sanitizers; the message says what to install."""


def check_gcc() -> None:
    """Unavailable: there is no gcc, or it has no library of a sanitizer."""
    if shutil.which("gcc") is None:
        raise Unavailable(f"gcc is not on the PATH, and the sanitizers are gcc's ({REMEDY})")
    for runtime in RUNTIMES:
        if not Path(_answer("gcc", f"-print-file-name={runtime}.so")).is_absolute():
            raise Unavailable(f"gcc has no {runtime}.so, the library of its sanitizer ({REMEDY})")


def build(folder: Path = FOLDER) -> list[Path]:
    """The extensions of setup.py with the sanitizers, below `folder` as in a wheel, made anew where a source
    changed.

    Unavailable: there is no gcc or no runtime library of a sanitizer. subprocess or setuptools errors: a
    source does not compile.
    """
    check_gcc()
    try:
        import_module("setuptools")  # brings distutils
    except ImportError as error:
        raise Unavailable(f"{error}; the environment of `make dev` has setuptools") from error
    os.chdir(TOP)  # setup.py names its sources from here
    os.environ |= {"CC": "gcc", "LDSHARED": "gcc -shared"}
    distribution = import_module("distutils.core").run_setup("setup.py", stop_after="init")
    for _, library in distribution.libraries:
        library["cflags"] = [*_watched(library["cflags"]), *NO_COPIES_OF_FRAMES]
        library["obj_deps"][""] += ["setup.py", __file__]
    for extension in distribution.ext_modules:
        extension.extra_compile_args = _watched(extension.extra_compile_args)
        extension.extra_link_args = [f for f in extension.extra_link_args if f != "-s"] + SANITIZERS
        extension.depends = [*extension.depends, "setup.py", __file__]
    objects = str(folder / "objects")
    kernels, command = distribution.get_command_obj("build_clib"), distribution.get_command_obj("build_ext")
    kernels.build_clib = kernels.build_temp = command.build_temp = objects
    command.build_lib = str(folder)
    for each in ("build_clib", "build_ext"):
        distribution.run_command(each)
    return [Path(path) for path in command.get_outputs()]


def _watched(options: Sequence[str]) -> list[str]:
    """The options of a compiler with the sanitizers, unoptimized enough for reports to name lines."""
    return [option for option in options if not option.startswith("-O")] + COMPILED_WITH


def environment(library: Path, reports: Path, before: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a Python can import `library`, an extension that was compiled with the
    sanitizers.

    before: the variables to start from. reports: the folder that gets a file for each process that a
    sanitizer ends.
    """
    preloaded = [_runtime(library, name) for name in RUNTIMES]
    # The sanitizer looks for C++'s `throw` when the process starts, and Python brings it only with the first
    # library in C++.
    preloaded.append(_answer("gcc", "-print-file-name=libstdc++.so.6"))
    report = f"{reports}/report"
    folders = [str(IMPORTED_FIRST), str(TOP), *filter(None, [before.get("PYTHONPATH")])]
    return {
        **before,
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": f"{ADDRESS_OPTIONS}:log_path={report}",
        "UBSAN_OPTIONS": UNDEFINED_OPTIONS,
        # else Python cuts its objects out of arenas, and a read past one's end is not seen
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": ":".join(folders),
        "SANITIZED": str(FOLDER),
        "SANITIZED_REPORT": report,
    }


def _runtime(library: Path, name: str) -> str:
    """The file of a sanitizer's runtime that the loader gives to `library`."""
    if found := re.search(rf"{name}\.so\S* => (/\S+)", _answer("ldd", str(library))):
        return found[1]
    raise Unavailable(f"the dynamic loader finds no {name} for {library} ({REMEDY})")


def _answer(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(command: Sequence[str]) -> int:
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    reports = FOLDER / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    try:
        library = build()[0]
        reports.mkdir(parents=True)
        code = subprocess.run(command, env=environment(library, reports, os.environ), check=False).returncode
    except Unavailable as error:
        print(f"sanitizers: {error}", file=sys.stderr)
        return 1
    found = sorted(reports.iterdir())
    for report in found:
        print(f"\n{report}:\n{report.read_text(errors='replace')}", file=sys.stderr)
    return code or int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
