#!/usr/bin/env bash
# Sets up .venv if it is absent, and runs the test suite. Arguments go to pytest:
#   bash launch/test.sh -k packaging -x
# Without arguments two lanes run side by side, because a server leaves a core idle most of the time.
# The output of the second lane is printed at the end. A server of the tests takes 3 GiB.
# The first lane has one to four servers at a time. The second lane has none at first, then one or two. Both wait for room (tests/room.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

pytest=(.venv/bin/python -P -m pytest --durations=15)
[ $# -eq 0 ] || exec "${pytest[@]}" "$@"

pytest+=(-p no:cacheprovider)
first() {
  local status=0
  "${pytest[@]}" tests/e2e -m fleet || status=$?
  "${pytest[@]}" tests/e2e -m "not fleet and not two_servers" || status=$?
  return "$status"
}
second() {
  local status=0
  "${pytest[@]}" --ignore=tests/e2e || status=$?
  "${pytest[@]}" tests/e2e -m two_servers || status=$?
  return "$status"
}

log=.out/tests.log status=0
set -m  # makes the second lane a process group, which one signal ends
second >"$log" 2>&1 &
beside=$!
trap 'kill -- "-$beside" 2>/dev/null || true' EXIT
first || status=$?
wait "$beside" || status=$?
cat "$log"
exit "$status"
