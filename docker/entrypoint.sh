#!/bin/sh
# What the container runs: entrypoint.sh MODEL... [-- OPTION...]
#
# MODEL is the path of a model.toml, which is loaded first, or the name of a model that is already published in the shared
# memory that this container sees (docker run --ipc). OPTION and the environment (TABLESIDE_*) are those of `tableside serve`.
set -eu

names=$(python3 "$(dirname "$0")/preflight.py" "$@") # ends here, with one line, where something is missing
export TABLESIDE_HOST="${TABLESIDE_HOST:-0.0.0.0}"   # the loopback address of a container reaches nobody

# The load runs in the background, because a shell acts on a signal only between its foreground commands.
load() {
    tableside load "$1" &
    trap 'kill $! && wait $!; exit 143' TERM INT
    wait $!
    trap - TERM INT
}

while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
    *[./]*) load "$1" ;; # a model's name holds neither
    esac
    shift
done
[ $# -eq 0 ] || shift # the --

# shellcheck disable=SC2086 # one word a model: a name holds no space
exec tableside serve $names "$@"
