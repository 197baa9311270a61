#!/usr/bin/env bash
# emulated_python.sh FOLDER REQUIREMENT ...: makes FOLDER/python, Debian's Python for 64-bit ARM processors, which
# qemu-user runs, with these packages from wheels. Nothing is installed on this machine, which is Debian.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift

if [ ! -x "$folder/python" ]; then
    echo "unpacking Debian's Python for aarch64 and qemu-user into $folder"
    mkdir -p "$folder"/{root,host,apt/lists/partial,apt/archives/partial}
    touch "$folder/apt/status"
    cat > "$folder/apt/apt.conf" <<END
APT { Architecture "arm64"; Architectures { "arm64"; }; Sandbox::User "root"; };
Dir::State "$folder/apt";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt";
Debug::NoLocking "1";
END
    APT_CONFIG=$folder/apt/apt.conf apt-get update --quiet=2
    APT_CONFIG=$folder/apt/apt.conf apt-get install --quiet=2 --download-only --yes --no-install-recommends \
        python3 libstdc++6 libgomp1 > /dev/null
    for package in "$folder"/apt/archives/*.deb; do dpkg -x "$package" "$folder/root"; done
    (cd "$folder/apt" && apt-get download --quiet=2 qemu-user-static) 2> /dev/null
    dpkg -x "$folder"/apt/qemu-user-static_*.deb "$folder/host"
    version=$(basename "$folder"/root/usr/bin/python3.[0-9]*)
    # Programs that it starts find it by its own name, which is this one's.
    cat > "$folder/python" <<END
#!/bin/sh
export PYTHONHOME=$folder/root/usr PYTHONPATH=$folder/site
exec $folder/host/usr/bin/qemu-aarch64-static -L $folder/root -0 $folder/python $folder/root/usr/bin/$version "\$@"
END
    chmod +x "$folder/python"
fi

rm -rf "$folder/site"
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder/pip" pip
"$folder/python" "$(echo "$folder"/pip/pip-*.whl)/pip" install --quiet --disable-pip-version-check --root-user-action ignore \
    --target "$folder/site" --only-binary=:all: "$@"
