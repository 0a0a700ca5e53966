#!/usr/bin/env bash
# Sets up .venv if that has not been done and runs the test suite. Arguments go to pytest:
#   bash launch/test.sh -k packaging -x
# Without any, the end-to-end tests run beside all others, whose output follows: a server leaves a core idle most of the time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

pytest=(.venv/bin/python -P -m pytest --durations=15)
[ $# -eq 0 ] || exec "${pytest[@]}" "$@"

others=.out/tests.log status=0
"${pytest[@]}" --ignore=tests/e2e -p no:cacheprovider >"$others" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true' EXIT
"${pytest[@]}" tests/e2e || status=$?
wait "$beside" || status=$?
cat "$others"
exit "$status"
