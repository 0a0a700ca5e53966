#!/usr/bin/env bash
# Sets up .venv if that has not been done and runs the test suite. Arguments go to pytest:
#   bash launch/test.sh -k packaging -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
exec .venv/bin/python -P -m pytest --durations=15 "$@"
