#!/bin/bash
# Runs on the GPU machine, in a copy of the project with .gpu/: phases by value, each with its own limit.
# What a phase found is in $OUT as soon as it ends.
#   LIMIT=530 bash .gpu/first_run.sh                all phases within 530 s
#   LIMIT=150 bash .gpu/first_run.sh lossless       chosen ones; packages and kernels are found again
#   DRY=yes bash tools/gpu/first_run.sh probe smoke steps efficiency lossless    dry run, on a CPU
set -u
LIMIT=${LIMIT:-530}                    # seconds after which no phase begins
PY=${PY:-python3} DEV=cuda SHAPE=llama-3.1-8b TOK=64 N=${N:-20000} GRAPHS=on
PLANS=4x6,none,gbv:4x6,block:1x6,1x4,2x4,3x4,2x6 BATCHES=1,4,16 LESS=
if [ -n "${DRY:-}" ]; then
  DEV=cpu SHAPE=tiny TOK=4 N=40 GRAPHS=eager PLANS=2x2,none BATCHES=1
  LESS="--prompts 1 --repeats 1 --tokens 4"
  SHORT="--contexts 16 --steps 2"
fi
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
smoke() { phase smoke 100 "$PY" "$kit/smoke.py" $DEV $TOK; }
step() { phase "$1" "$2" $PY -m eaglegbv bench step --shape $SHAPE --device $DEV ${SHORT:-} --out "$OUT/steps.jsonl" "${@:3}"; }
steps() { step steps 150 --plans $PLANS --batches $BATCHES --cuda-graphs $GRAPHS; }
eager() { step eager 60 --plans 4x6,none --cuda-graphs off; }
greedy() { step greedy 60 --plans 4x6 --contexts 512,2048 --temperature 0,1 --cuda-graphs $GRAPHS; }
batch() { phase "$1" "$2" $PY -m eaglegbv bench batch --device $DEV --batches $BATCHES --out "$OUT/$1.json" --tokens 128 --repeats 2 --prompts 4 $LESS "${@:3}"; }
efficiency() { batch efficiency 90 --shape $SHAPE --efficiency ${EFFICIENCY:-3.5} --ways 3x4,2x6,none; }
tests() {
  [ -z "${JIT:-}" ] || wait "$JIT"
  TAIL=40 phase kernels 150 $T tests/unit/attention
  phase graphs 150 $T tests/integration/test_engine_graphs.py -k 'not inductor'
}
tiny() { batch tiny 110 --ways auto,3x4,none,transformers --questions-set builtin --explain; }
lossless() {
  phase lossless 70 $PY -m eaglegbv audit pair --device $DEV --dtype bfloat16 --verifier none,otbv,gbv,block --depth 3 \
    --tokens 3 --top-k 5 --samples $N --prompt "Name three kinds of fruit." --prompt "What is 3 + 4?"
}
inductor() {
  step inductor 200 --plans 4x6,none --cuda-graphs $GRAPHS --compile inductor
  phase graphs-inductor 100 $T tests/integration/test_engine_graphs.py -k inductor
}
setup
for name in ${*:-jit probe smoke steps efficiency tests lossless eager greedy tiny inductor}; do $name; done
say done
