#!/bin/sh
# Sees to a C compiler and Python's headers, which build the native kernel. Never fails: the kernel is optional.
set -eu
python=${PYTHON:-python3}
header='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'

ready() {
    { command -v cc || command -v gcc; } >/dev/null 2>&1 && "$python" -c "$header" 2>/dev/null
}

install() {
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev python3-dev
}

if ready; then exit 0; fi
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "installing gcc, libc6-dev and python3-dev with apt-get, to build the native kernel"
    install >/dev/null 2>&1 || true
    if ready; then exit 0; fi
fi
echo "warning: no C compiler with Python.h, so the native kernel is left out and lookups run on FBGEMM" >&2
