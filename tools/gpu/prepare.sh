#!/bin/bash
# Run where there is a network, in a checkout. Makes .gpu/: what a bare GPU machine without a network lacks
# (Python 3.12, torch 2.11+cu130, transformers and nvcc 13 are expected on it). Checks the size of all that travels.
#
#   bash tools/gpu/prepare.sh            the checkout travels, with .gpu/
#   bash tools/gpu/prepare.sh FOLDER     FOLDER travels: made anew, without what no phase reads
#
# Then, there:  LIMIT=530 bash tools/gpu/first_run.sh
#
# PACKAGES=none leaves FlashInfer and msgspec out, for a dry run on a machine that has what it needs. KERNELS=DIR takes
# along what `FLASHINFER_WORKSPACE_BASE=DIR python tools/gpu/compile_kernels.py` compiled; without, the GPU machine compiles.
set -eu
cd "$(git rev-parse --show-toplevel)"
prep=${PREP:-${TMPDIR:-/tmp}/gpu-prep}
limit=$((64 << 20)) spare=600000         # bytes that may travel; room for growth between here and there
unread=(':!docs' ':!examples' ':!eaglegbv/assets/smollm2' ':!eaglegbv/assets/tiny/eagle1')

folder=${1:-$PWD}
if [ $# -gt 0 ]; then
  rm -rf "$folder" && mkdir -p "$folder"
  git ls-files -z -- . "${unread[@]}" | tar --null -T - -cf - | tar -C "$folder" -xf -
else
  exclude=$(git rev-parse --git-path info/exclude)
  mkdir -p "$(dirname "$exclude")"
  grep -qx '/.gpu/' "$exclude" 2>/dev/null || echo '/.gpu/' >> "$exclude"
fi
mkdir -p "$folder/.gpu"
git describe --always --dirty --exclude '*' > "$folder/.gpu/commit"

if [ "${PACKAGES:-}" != none ]; then
  mkdir -p "$prep/whl"
  need() { ls "$prep"/whl/"$1"-*.whl >/dev/null 2>&1; }
  if ! { need flashinfer_python && need apache_tvm_ffi && need msgspec; }; then
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
      --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
      --platform manylinux2014_x86_64 -d "$prep/whl" \
      flashinfer-python==0.6.18.post1 apache-tvm-ffi==0.1.12 msgspec==0.22.0
  fi
  rm -rf "$prep/site"
  python3 - "$prep" <<'PY'
import pathlib, sys, zipfile
prep = pathlib.Path(sys.argv[1])
for wheel in (prep / "whl").glob("*.whl"):  # without CUTLASS, which fa2 does not include
    with zipfile.ZipFile(wheel) as packed:
        names = [n for n in packed.namelist() if not n.startswith("flashinfer/data/cutlass/")]
        packed.extractall(prep / "site", names)
PY
  [ -z "${KERNELS:-}" ] || find "$KERNELS" -path '*/cached_ops/*' -name '*.so' | while read -r kernels; do
    to=$prep/site/flashinfer/data/aot/$(basename "$kernels" .so)
    mkdir -p "$to" && cp "$kernels" "$to/" && strip --strip-unneeded "$to"/*.so
  done
  tar -C "$prep/site" -cf - . | xz -T2 -6 > "$folder/.gpu/site.tar.xz"
fi

travels() {
  if [ "$folder" = "$PWD" ]; then
    git ls-files -z -co --exclude-standard
    find .gpu shared/ -type f -print0 2>/dev/null || true
  else
    cd "$folder" && find . -type f -print0
  fi
}
size=$( (travels) | (cd "$folder" && xargs -0 stat -c %s 2>/dev/null) | awk '{s += $1} END {print s + 0}')
echo "what travels from $folder: $size bytes of $limit"
[ "$size" -le $((limit - spare)) ] || { echo "TOO LARGE: make a folder without what no phase reads: prepare.sh FOLDER"; exit 1; }
