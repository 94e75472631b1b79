#!/usr/bin/env bash
# spawn.sh N PROGRAM ARGS...: starts N ranks of PROGRAM on this machine, fails when one of them does.
set -u
ranks=$1; shift
file=$(mktemp -u)
export WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks ACCELERATE_RENDEZVOUS_FILE=$file
pids=()
for ((rank = 0; rank < ranks; ++rank)); do
  RANK=$rank LOCAL_RANK=$rank "$@" & pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
rm -f "$file"
exit $status
