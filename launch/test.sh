#!/usr/bin/env bash
# Sets up what is absent, and runs the tests. A release of SGLang and arguments for pytest may be given:
#   bash launch/test.sh                               # everything
#   bash launch/test.sh -k packaging -x               # what pytest selects, on the newest release that is tested
#   bash launch/test.sh 0.5.17 tests/e2e -k canary    # the same on an older one
# Without arguments a GPU is hidden, and the newest release has the whole suite. An older one has its hooks, what is marked both_releases, and its own Triton.
# Releases are set up side by side, and the tests of the newest do not wait for older ones.
# Two lanes take parts from one list, because a server leaves a core idle most of the time.
# A part is printed when it ends. The faults of all parts, and how each of them ended, are printed in the end. A server takes 3 GiB.
# Part fleet has three or four servers, unit and hooks none, servers of the newest release one, and the others two.
# They wait for room (tests/room.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environments.sh

if [ $# -gt 0 ]; then
  release=$newest
  if [[ $1 =~ ^[0-9][0-9.]*$ ]]; then
    release=$1
    shift
  fi
  bash launch/setup.sh "$release"
  exec "$(environment_of "$release")/bin/python" -P -m pytest --durations=15 "$@"
fi

# Prints a line a part: its name, its release, and arguments for pytest. Fleet and unit go first, because one of them needs no server.
# The longest of the others follow first, so that both lanes end together.
parts() {
  local release
  echo "fleet $newest tests/e2e -m fleet"
  echo "unit $newest --ignore=tests/e2e"
  echo "pairs $newest tests/e2e -m two_servers"
  echo "servers $newest tests/e2e -m 'not fleet and not two_servers'"
  for release in "${older[@]}"; do
    echo "servers-$release $release tests/e2e -m 'both_releases and not fleet'"
    echo "fleet-$release $release tests/e2e -m 'both_releases and fleet'"
    echo "hooks-$release $release tests/scheduler_patch tests/kernels/test_hazards.py"
  done
}

# Runs a part. It fails if the part does, whatever ended it.
run() {
  local name=$1 release=$2 log=$logs/$1.log status=0
  shift 2
  {
    bash launch/setup.sh "$release" &&
      "$(environment_of "$release")/bin/python" -P -m pytest --durations=15 -p no:cacheprovider "$@"
  } >"$log" 2>&1 || status=$?
  printf '==== %s ends with exit status %s\n' "$name" "$status" >>"$log"
  {
    flock 9
    printf '\n==== %s\n' "$name"
    cat "$log"
  } 9<"$logs"
  [ "$status" = 0 ]
}

# Prints a line a part: its name, how it ended, and the last line that it wrote. The last line of all names the parts that failed.
summary() {
  local name end failed=()
  while read -r name _; do
    end="not run"
    if [ -e "$logs/$name.log" ]; then end=$(sed -n '$s/.* ends with \(exit status [0-9]*\)$/\1/p' "$logs/$name.log"); fi
    [ "$end" = "exit status 0" ] || failed+=("$name")
    printf '%-16s %-16s %s\n' "$name" "${end:-killed}" "$(sed '/ ends with exit status /d' "$logs/$name.log" 2>/dev/null | tail -n 1)"
  done < <(parts)
  if ((${#failed[@]})); then echo "Failed: ${failed[*]}" && return 1; fi
}

older=("${tested[@]::${#tested[@]}-1}") logs=.out/tests status=0
rm -rf "$logs"
mkdir -p "$logs"
set -m  # a background job is a process group, which one signal ends
trap 'for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for release in "${older[@]}"; do
  bash launch/setup.sh "$release" >"$logs/setup-$release.out" 2>&1 &
done
bash launch/setup.sh &
wait "$!"  # a signal ends a wait at once
export newest logs CUDA_VISIBLE_DEVICES=  # servers on a CPU refuse to start where SGLang sees a GPU
export -f environment_of run
parts | xargs -L 1 -P 2 bash -c 'run "$@"' run &
wait "$!" || status=$?
printf '\n==== All parts\n'
grep -hE '^(FAILED|ERROR) ' "$logs"/*.log || true
summary || status=$((status ? status : 1))
exit "$status"
