# shellcheck shell=bash disable=SC2034
# Shared by the commands in this folder, which source it. Written for the bash of a bare Debian: it uses
# nothing but bash and coreutils until tools/setup has brought the rest.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
BUILD=build
VENV=.venv
TORCH=2.11.0

say() { printf '\n== %s\n' "$*" >&2; }
fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# The comment block at the top of the calling script is its help.
show_help() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; }

# Compile jobs: one per core, but no more than the free memory holds (a file that includes much of LibTorch
# takes 1.5 GB to compile). A control group's limit counts too.
job_count() {
  local cores memory limit used
  cores=$(nproc)
  memory=$(awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo)
  limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
  if [[ $limit != max ]]; then
    used=$(cat /sys/fs/cgroup/memory.current 2>/dev/null || echo 0)
    limit=$(((limit - used) / 1048576))
    ((limit < memory)) && memory=$limit
  fi
  memory=$((memory / 1500))
  ((memory < cores)) && cores=$memory
  echo $((cores < 1 ? 1 : cores))
}

# The folder of a LibTorch that the caller named, or nothing.
given_libtorch() {
  local prefix candidate
  local prefixes=${Torch_DIR:+$Torch_DIR/../../..:}${CMAKE_PREFIX_PATH:-}
  local IFS=:
  for prefix in ${prefixes//;/:}; do
    for candidate in "$prefix" "$prefix/../.." "$prefix/torch"; do
      if [[ -e $candidate/include/torch/csrc/api/include/torch/version.h ]]; then
        (cd "$candidate" && pwd)
        return
      fi
    done
  done
}

# cmake of the system, or the one that setup put into .venv where the system's is too old.
cmake_command() {
  if [[ -x $VENV/bin/cmake ]]; then echo "$VENV/bin/cmake"; else echo cmake; fi
}

# configure ARGUMENT...: makes or renews the build folder.
configure() {
  local cmake home
  cmake=$(cmake_command)
  if [[ -e $BUILD/CMakeCache.txt ]]; then
    home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$BUILD/CMakeCache.txt")
    if [[ $home != "$PWD" ]]; then
      say "The build folder was made for ${home:-another folder}; making it anew"
      rm -rf "$BUILD"
    elif ! grep -q '^CMAKE_GENERATOR:INTERNAL=Ninja$' "$BUILD/CMakeCache.txt"; then
      fail "the folder $BUILD was configured for another generator than Ninja. Remove it, or build with it yourself."
    fi
  fi
  local log
  log=$(mktemp)
  if ! "$cmake" --preset default "$@" >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    fail "CMake could not configure the build; its reasons stand above."
  fi
  if grep -q 'CMake Warning' "$log"; then cat "$log" >&2; else grep '^-- accelerate:' "$log" >&2 || true; fi
  rm -f "$log"
}

# build TARGET...: the lines of ninja that matter, and a hint of how long it takes.
build() {
  local jobs
  jobs=$(job_count)
  say "Building $* with $jobs jobs (from nothing: some 10 minutes on two cores; later only what changed)"
  "$(cmake_command)" --build --preset default --parallel "$jobs" --target "$@" >&2
}
