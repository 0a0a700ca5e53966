#!/usr/bin/env bash
# Installs the package, SGLang, and all that the tests and the demo need, into an environment of the checkout:
#   bash launch/setup.sh            # .venv, with the newest release of SGLang that is tested
#   bash launch/setup.sh 0.5.17     # .venv-0.5.17, with an older one
# If this has been done, it returns at once. It needs no environment variable. Its log is .out/setup.log, or .out/setup-0.5.17.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environments.sh

release=${1:-$newest}
name=$(environment_of "$release")
venv=$PWD/$name
log=$PWD/.out/setup${name#.venv}.log
supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'

say() { printf 'setup: %s\n' "$*"; }

fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# Prints the first interpreter that the package supports.
find_python() {
  local name
  for name in python3.11 python3.12 python3; do
    if "$name" -c "$supported" 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  return 1
}

# Prints the Debian packages that are missing. Those after nvidia-smi are for Triton, which compiles C, and for sgl_kernel.
missing_packages() {
  local python=$1
  if [ -z "$python" ]; then
    command -v python3 >/dev/null || echo python3 python3-venv
  elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo python3-venv
  fi
  nvidia-smi >/dev/null 2>&1 || return 0
  command -v gcc >/dev/null || echo gcc libc6-dev
  ldconfig -p | grep -q libnuma.so.1 || echo libnuma1
  if [ -n "$python" ]; then
    "$python" -c 'import sysconfig as s, os, sys; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
      echo python3-dev
  fi
}

last_step() {
  grep -oE '^ *(Collecting|Downloading|Using cached|Building|Installing|Get:|Unpacking|Setting up)[^(,]{0,70}' "$log" |
    tail -n 1 | sed 's/^ *//; s/ *$//' || true
}

size_of() { du -sh "$1" 2>/dev/null | cut -f 1; }

# Runs a command with its output in the log. Prints a line every 15 s, and the end of the log if the command fails.
quietly() {
  local what=$1 started=$SECONDS beat=15 status=0
  shift
  say "$what"
  printf '\n== %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null 9>&- &
  local pid=$!
  trap 'kill '"$pid"' 2>/dev/null; say "stopped"; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    if ((SECONDS - started >= beat)); then
      say "  $((SECONDS - started)) s, $name holds $(size_of "$venv"): $(last_step)"
      beat=$((beat + 15))
    fi
  done
  wait "$pid" || status=$?
  trap - INT TERM
  if ((status)); then
    tail -n 40 "$log" | grep -v '^ *WARNING' | tail -n 20 >&2
    say "failed with exit code $status after $((SECONDS - started)) s: $what; the whole log is $log" >&2
    exit "$status"
  fi
}

install_packages() {
  local root=()
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || fail "these system packages are missing: $*" "run as root: apt-get install $*"
    root=(sudo -n)
  fi
  command -v apt-get >/dev/null || fail "these Debian packages, or what your system calls them, are missing: $*"
  quietly "reading the package lists" "${root[@]}" apt-get update
  quietly "installing $*" "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

pip_install() {
  # TMPDIR: downloads and wheels in progress need gigabytes, which /tmp may not have.
  # --no-compile: most of the 22,000 files are never imported, and the first process that imports one compiles it.
  mkdir -p "$venv/tmp"
  quietly "$1" env TMPDIR="$venv/tmp" "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile "${@:2}"
  rm -rf "$venv/tmp"
}

is_tested "$release" || fail "SGLang $release: expected one of the tested releases, which are ${tested[*]}; name one of them, or none"
mkdir -p .out
exec 9>"${log%.log}.lock"
flock -n 9 || { say "another setup of $name is running in this checkout; waiting for it" && flock 9; }

wanted="$release $(sha256sum pyproject.toml launch/setup.sh | sha256sum) $PWD"
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c "$supported" 2>/dev/null; then
  exit 0
fi

started=$SECONDS
: >"$log"
python=$venv/bin/python
exec 8>.out/packages.lock
flock 8  # apt-get does not wait for another, which setup of another release may have started
[ -x "$python" ] || python=$(find_python || true)
packages=($(missing_packages "$python"))
((${#packages[@]} == 0)) || install_packages "${packages[@]}"
exec 8>&-
if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python) || fail "Python 3.11 or 3.12 is needed, found $(python3 --version 2>&1); install one and run this again," \
    "or make the environment yourself, for example: uv venv --seed --python 3.12 $name"
  quietly "making $name with $("$python" --version)" "$python" -m venv "$venv"
fi
"$venv/bin/python" -c "$supported" ||
  fail "$venv has $("$venv/bin/python" --version 2>&1), expected 3.11 or 3.12; remove that directory and run this again"
pip_install "updating pip" --upgrade 'pip>=24'
if [ "$release" = "$newest" ]; then disk="11 GB on disk, 13 GB while it runs"; else disk="9 GB on disk"; fi
pip_install "installing sglang-freekv and SGLang $release: a download of 4 GB, $disk" \
  --editable '.[test]' "sglang==$release"
printf '%s' "$wanted" >"$venv/installed"
say "done in $((SECONDS - started)) s"
