#!/usr/bin/env bash
# All that docs/data-path.md and docs/reliability.md tell of one GPU: the tests side by side, then one measurement after the other, in about
# half an hour. Parts that are named are run alone: bash benchmarks/data_path.sh OUT pair step
# Results and logs go to OUT; what fails is told, and the next part goes on. COMMIT names the code where there is no repository.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: data_path.sh OUT [PART...]}
shift
parts=("$@")
[ $# -gt 0 ] || parts=(tests pair step recall kernels qwen3-8b qwen2.5-7b)
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1

part() {  # NAME COMMAND...: its output goes to a log, its end is told
  local name=$1 begun=$SECONDS status=0
  shift
  "$@" >"$out/$name.log" 2>&1 || status=$?
  echo "$(date -u +%H:%M:%S) $name: exit status $status after $((SECONDS - begun)) s: $(tail -n 1 "$out/$name.log" | cut -c1-200)"
}
bench() { "$python" -m "benchmarks.$1" --out "$out" "${@:2}"; }
tests() { "$python" -P -m pytest -q -p no:cacheprovider "$@"; }

tests_side_by_side() {
  local workers=()
  "$python" -c "import xdist" 2>/dev/null && workers=(-n 4)
  part engine tests "${workers[@]}" tests/gpu/test_engine_on_gpu.py &
  part references tests "${workers[@]}" tests/kernels &
  part server tests tests/gpu/test_server_on_gpu.py &
  part sanitizer compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -P -m pytest -q -p no:cacheprovider \
    tests/gpu/test_engine_on_gpu.py -k "(follows_the_paper or eager_one) and (tight or two-bit)" &
  part needle bench bench_needle --skip "tp-2*" &
  wait
}

for name in "${parts[@]}"; do
  case $name in
    tests) tests_side_by_side ;;
    pair) part pair bench bench_serving_pair --minutes 10 ;;
    step) part step bench bench_step --profile 32k-b8/freekv --only "*/attention-only" "*/freekv" "*/copies-off" "*/uncorrected" "*/canary-*" ;;
    recall) part recall bench bench_recall ;;
    kernels) part kernels bench bench_kernels --minutes 3 ;;
    *) part "$name" bench bench_serving_pair --shape "$name" --systems stock freekv --only prefill-32k "decode-32k-*" --minutes 4.6 ;;
  esac
done
