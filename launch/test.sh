#!/usr/bin/env bash
# Sets up .venv if that has not been done and runs the test suite. Arguments go to pytest:
#   bash launch/test.sh -k packaging -x
# Without any, end-to-end tests that start servers of their own run beside all others, and their output follows: a server leaves a
# core idle most of the time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

pytest=(.venv/bin/python -P -m pytest --durations=15)
[ $# -eq 0 ] || exec "${pytest[@]}" "$@"

mapfile -t own < <(grep -L fleet tests/e2e/test_*.py)
beside=.out/tests.log status=0
"${pytest[@]}" "${own[@]}" -p no:cacheprovider >"$beside" 2>&1 &
running=$!
trap 'kill "$running" 2>/dev/null || true' EXIT
"${pytest[@]}" "${own[@]/#/--ignore=}" || status=$?
wait "$running" || status=$?
cat "$beside"
exit "$status"
