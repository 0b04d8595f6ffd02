#!/bin/bash
# Runs on the GPU machine, in what prepare.sh made ready: phases by value, which share the time.
#   LIMIT=530 bash tools/gpu/first_run.sh                all phases within 530 s
#   LIMIT=150 bash tools/gpu/first_run.sh tests eager    chosen ones, while the machine is warm: nothing is unpacked
#                                                        or compiled again
#   DRY=yes LIMIT=900 bash tools/gpu/first_run.sh probe smoke steps lossless efficiency tests     on a CPU
# $OUT gets three files, renewed every 10 s: summary.txt, steps.jsonl, and logs.tar.gz with all else.
set -u
# Seconds of each phase, together 530. What a phase does not use, the later ones have.
declare -A SHARES=(
  [probe]=60 [smoke]=50 [steps]=80 [kernels]=40 [lossless]=45 [efficiency]=60 [inductor]=70 [tests]=50 [sglang]=25
  [greedy]=20 [eager]=15 [tiny]=15
)
PHASES=${*:-probe smoke steps kernels lossless efficiency inductor tests sglang greedy eager tiny}
LIMIT=${LIMIT:-530} PY=${PY:-python3} DEV=cuda SHAPE=llama-3.1-8b TOK=32 N=${N:-1500} GRAPHS=on
PLANS=4x6,none,gbv:4x6,block:1x6,1x4,2x4,3x4,2x6 BATCHES=1,4,16 SHORT= LESS=
if [ -n "${DRY:-}" ]; then
  DEV=cpu SHAPE=tiny TOK=4 N=40 GRAPHS=eager PLANS=2x2,none BATCHES=1
  LESS="--prompts 1 --repeats 1 --tokens 4"
  SHORT="--contexts 16 --steps 2"
fi
cd "$(dirname "$0")/../.." || exit 1
tools=tools/gpu packed=.gpu
scratch=${TMPDIR:-/tmp}; back=${OUT:-$scratch/gpu-out}; logs=$scratch/gpu-log
mkdir -p "$back" "$logs"

SECONDS=0
say() { echo "[$SECONDS s] $*" | tee -a "$logs/summary.txt"; }
pack() {
  cp "$logs/summary.txt" "$back/"
  for run in "$logs"/steps-*; do
    [ ! -e "$run/observations.jsonl" ] || { tr -d '\n' < "$run/head.json"; echo; cat "$run/observations.jsonl"; }
  done > "$back/steps.jsonl"
  tar -C "$logs" -czf "$scratch/logs.part" . && mv "$scratch/logs.part" "$back/logs.tar.gz"
}

unpack() {                             # packages and kernels that the machine lacks
  [ -e "$packed/site.tar.xz" ] && [ ! -d "$scratch/site" ] || return 0
  rm -rf "$scratch/site.part" && mkdir -p "$scratch/site.part"
  tar -C "$scratch/site.part" -xJf "$packed/site.tar.xz" && mv "$scratch/site.part" "$scratch/site"
}
# CUDA's home as nvcc itself names it, which may be a script elsewhere; and names to link against that may be missing.
cuda() {
  local top stub=$scratch/stub runtime
  mkdir -p "$stub"
  if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
    top=$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
    [ -d "$top" ] && CUDA_HOME=$(cd "$top" && pwd -P) && export CUDA_HOME
  fi
  [ -e "$stub/libcuda.so" ] || gcc -shared -o "$stub/libcuda.so" -Wl,-soname,libcuda.so.1 -x c /dev/null
  runtime=$(find -L "${CUDA_HOME:-/usr/local/cuda}" -name libcudart.so -print -quit 2>/dev/null)
  [ -n "$runtime" ] || runtime=$($PY - <<'PY'
import pathlib, sysconfig
wheels = pathlib.Path(sysconfig.get_path("purelib"), "nvidia")
print(next(iter(sorted(wheels.glob("*/lib/libcudart.so.1[0-9]"))), ""))
PY
  )
  [ -z "$runtime" ] || ln -sf "$runtime" "$stub/libcudart.so"
  export FLASHINFER_EXTRA_LDFLAGS="-L$stub"
}
setup() {
  unpack
  cuda
  export PYTHONPATH=$scratch/site:$PWD PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TOKENIZERS_PARALLELISM=false
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 FLASHINFER_CUDA_ARCH_LIST=9.0a MAX_JOBS=$(nproc)
  export FLASHINFER_WORKSPACE_BASE=$scratch/fi TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton
  EAGLEGBV_COMMIT=$(cat "$packed/commit") && export EAGLEGBV_COMMIT
  { nvidia-smi; nvcc --version; nproc; free -g; df -h "$scratch"; $PY --version; $PY -m pip list; } > "$logs/machine.log" 2>&1
  say "eaglegbv at $EAGLEGBV_COMMIT; $($PY --version); CUDA_HOME ${CUDA_HOME:-none};" \
    "$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo no GPU)"
}
# Only the CPUs work on it: a phase that needs a module waits for it, under FlashInfer's own lock.
compile() {
  [ "$DEV" = cuda ] && command -v nvcc >/dev/null || return 0
  timeout "$LIMIT" nice "$PY" $tools/compile_kernels.py > "$logs/kernels.log" 2>&1 & COMPILES=$!
}

total=0 passed=0
for name in $PHASES; do total=$((total + ${SHARES[$name]:?there is no phase $name})); done
phase() {                              # phase NAME COMMAND...
  local name=$1 most; shift
  passed=$((passed + SHARES[$name]))
  most=$((LIMIT * passed / total - SECONDS))
  [ "$most" -ge 15 ] || { say "SKIP $name: no time"; return; }
  say "BEGIN $name (at most $most s)"
  timeout -k 5 "$most" "$@" > "$logs/$name.log" 2>&1
  say "END $name: rc $?"
  tail -n "${TAIL:-12}" "$logs/$name.log" | cut -c1-220 | tee -a "$logs/summary.txt"
}
step() { phase "$1" $PY -m eaglegbv bench step --shape $SHAPE --device $DEV $SHORT --out "$logs/steps-$1" "${@:2}"; }
batch() {
  phase "$1" $PY -m eaglegbv bench batch --device $DEV --batches $BATCHES --out "$logs/batch-$1" --tokens 128 --repeats 2 \
    --prompts 4 $LESS "${@:2}"
}
probe() { phase probe $PY $tools/probe.py; }
smoke() { phase smoke $PY $tools/smoke.py $DEV $TOK; }
steps() { step steps --plans $PLANS --batches $BATCHES --cuda-graphs $GRAPHS; }
lossless() {
  phase lossless $PY -m eaglegbv audit pair --model tiny --device $DEV --dtype bfloat16 --verifier none,otbv,gbv,block --depth 3 \
    --tokens 3 --top-k 5 --samples $N --prompt "Name three kinds of fruit."
}
efficiency() { batch efficiency --shape $SHAPE --efficiency ${EFFICIENCY:-3.5} --ways 3x4,2x6,none; }
inductor() { step inductor --plans 4x6,none --cuda-graphs $GRAPHS --compile inductor; }
checks() { TAIL=40 phase "$1" $PY -m pytest -o cache_dir=$scratch/pytest -p no:randomly -n 0 -rA -q --timeout 60 --tb short "${@:2}"; }
kernels() {                            # compiled there, interpreted elsewhere
  checks kernels tests/unit/test_fused_layers.py tests/unit/drafters/test_drawn_paths.py tests/unit/test_kernels.py
}
tests() {                              # attention first, then whole texts with graphs
  checks tests -m gpu tests/unit/attention tests/integration/test_engine_graphs.py
}
sglang() { checks sglang tests/sglang/test_round_launches.py; }
greedy() { step greedy --plans 4x6 --contexts 512,2048 --temperature 0,1 --cuda-graphs $GRAPHS; }
eager() { step eager --plans 4x6,none --cuda-graphs off; }
tiny() { batch tiny --model tiny --ways auto,3x4,none,transformers --questions-set builtin --explain; }

COMPILES=
setup
(while sleep 10; do pack; done) & packer=$!
trap 'kill $packer $COMPILES 2>/dev/null; pack' EXIT
trap 'exit 143' TERM INT
compile
for name in $PHASES; do $name; done
[ ! -e "$logs/kernels.log" ] || tail -n 5 "$logs/kernels.log" | cut -c1-160
say done
