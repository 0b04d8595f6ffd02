#!/bin/bash
# Runs on the GPU machine, in a copy of the project with .gpu/: phases by value, each with its own limit.
# What a phase found is in $OUT as soon as it ends.
#   LIMIT=530 bash .gpu/first_run.sh                all phases within 530 s
#   LIMIT=150 bash .gpu/first_run.sh lossless       chosen ones; packages and kernels are found again
#   DEV=cpu SHAPE=tiny QUICK=--quick TOK=4 N=32 bash tools/gpu/first_run.sh probe smoke steps lossless    dry run
set -u
LIMIT=${LIMIT:-530}                    # seconds after which no phase begins
DEV=${DEV:-cuda} PY=${PY:-python3} SHAPE=${SHAPE:-llama-3.1-8b} STEPS=${STEPS:-190}
scratch=${TMPDIR:-/tmp}; OUT=${OUT:-$scratch/gpu-out}
here=$(cd "$(dirname "$0")" && pwd); kit=$here
[ -e "$kit/probe.py" ] || kit=$here/kit
mkdir -p "$OUT"
SECONDS=0
say() { echo "[$SECONDS s] $*" | tee -a "$OUT/summary.txt"; }
phase() {                              # phase NAME LIMIT COMMAND...
  local name=$1 most=$(($2 * ${SLOW:-1})) left=$((LIMIT - SECONDS)); shift 2
  [ "$left" -ge 15 ] || { say "SKIP $name: no time"; return; }
  [ "$most" -le "$left" ] || most=$left
  say "BEGIN $name (at most $most s)"
  timeout -k 5 "$most" "$@" > "$OUT/$name.log" 2>&1
  say "END $name: rc $?"
  tail -n "${TAIL:-12}" "$OUT/$name.log" | cut -c1-220 | tee -a "$OUT/summary.txt"
}
setup() {
  if [ -e "$here/site.tar.xz" ] && [ ! -d "$scratch/site/flashinfer" ]; then
    mkdir -p "$scratch/site" && tar -C "$scratch/site" -xJf "$here/site.tar.xz"
  fi
  export PYTHONPATH=$scratch/site:$(pwd) PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TOKENIZERS_PARALLELISM=false
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 FLASHINFER_CUDA_ARCH_LIST=9.0a MAX_JOBS=12
  export FLASHINFER_WORKSPACE_BASE=$scratch/fi TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton
  local nvcc; nvcc=$(command -v nvcc) && export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$nvcc")")")}
  { nvidia-smi; nvcc --version; nproc; free -g; df -h "$scratch"; $PY --version; $PY -m pip list; } > "$OUT/machine.log" 2>&1
}
T="$PY -m pytest -p no:cacheprovider -n 0 -rA -q --timeout 60 --tb short -m gpu"
jit() {                                # compiles missing kernels in the background; only the CPUs work
  [ "$DEV" = cuda ] && command -v nvcc >/dev/null || return
  (MAX_JOBS=2 timeout 240 "$PY" "$here/aot.py" "$scratch/site/flashinfer/data/aot" 5 > "$OUT/jit.log" 2>&1) & JIT=$!
}
probe() { phase probe 75 "$PY" "$kit/probe.py"; }
smoke() { phase smoke 100 "$PY" "$kit/smoke.py" "$DEV" "${TOK:-64}"; }
steps() { phase steps "$STEPS" "$PY" "$kit/steps.py" "$OUT" --device "$DEV" --shape "$SHAPE" --budget $((STEPS - 12)) ${QUICK:-}; }
tests() {
  [ -z "${JIT:-}" ] || wait "$JIT"
  TAIL=40 phase kernels 150 $T tests/unit/attention
  phase graphs 150 $T tests/integration/test_engine_graphs.py -k 'not inductor'
}
tiny() { phase tiny 110 "$PY" -m eaglegbv bench batch --device "$DEV" --batches 1,4,16 --tokens 128 --repeats 2 --prompts 4 --ways auto,3x4,none,transformers --questions-set builtin --explain --out "$OUT/tiny.json"; }
lossless() { phase lossless 70 "$PY" "$kit/lossless.py" "$DEV" "${N:-20000}" 55; }
inductor() {
  phase inductor 200 "$PY" "$kit/steps.py" "$OUT" --device "$DEV" --shape "$SHAPE" --compile inductor --quick --budget 188
  phase graphs-inductor 100 $T tests/integration/test_engine_graphs.py -k inductor
}
setup
for name in ${*:-jit probe smoke steps tests tiny lossless inductor}; do $name; done
say done
