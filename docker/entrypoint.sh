#!/bin/sh
# What the container runs: entrypoint.sh MODEL... [-- OPTION...]
#
# MODEL is the path of a model.toml or of a checkpoint, which is loaded first, or the name of a model that is already published in
# the shared memory that this container sees (docker run --ipc). OPTION and the environment (TABLESIDE_*) are those of
# `tableside serve`, which is the container's first process and takes its signals.
set -eu

python3 "$(dirname "$0")/preflight.py" "$@"        # ends here, with one line, where something is missing
export TABLESIDE_HOST="${TABLESIDE_HOST:-0.0.0.0}" # the loopback address of a container reaches nobody

for argument; do # all but the --
    shift
    [ "$argument" = -- ] || set -- "$@" "$argument"
done
exec tableside serve "$@"
