#!/usr/bin/env bash
# Sets up .venv if it is absent, starts SGLang with KV retrieval on the needle model, and asks it two questions:
#   bash launch/demo.sh [--keep] [--port N]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environments.sh
bash launch/setup.sh
exec .venv/bin/python -m sglang_freekv.launch.demo "$@"
