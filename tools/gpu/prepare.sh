#!/bin/bash
# Run on a machine with a network, in the project's root. Makes .gpu/ there: what a bare GPU machine without a
# network lacks (Python 3.12, torch 2.11+cu130, transformers and nvcc 13 are expected on it), and the kit.
#
#   bash tools/gpu/prepare.sh          leaves FlashInfer's kernels to the GPU machine (25 s a module on 16 cores)
#   AOT=yes bash tools/gpu/prepare.sh  compiles them ahead (15 minutes a module on two cores), with nvcc and
#                                      VENV=.venv, a Python that has torch and flashinfer
#
# Then, there, in a copy of the project with .gpu/:  LIMIT=530 bash .gpu/first_run.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$(git rev-parse --show-toplevel)"
prep=${PREP:-${TMPDIR:-/tmp}/gpu-prep}
mkdir -p "$prep/whl" .gpu
exclude=$(git rev-parse --git-path info/exclude)
grep -qx '/.gpu/' "$exclude" 2>/dev/null || { mkdir -p "$(dirname "$exclude")"; echo '/.gpu/' >> "$exclude"; }

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
if [ "${AOT:-no}" = yes ]; then
  timeout "${AOT_SECONDS:-3000}" "${VENV:-.venv}/bin/python" "$here/aot.py" "$prep/aot" 2 ||
    echo "not all compiled: the rest is left to the GPU machine"
fi
if ls "$prep"/aot/*/*.so >/dev/null 2>&1; then
  mkdir -p "$prep/site/flashinfer/data/aot" && cp -r "$prep"/aot/*/ "$prep/site/flashinfer/data/aot/"
fi
tar -C "$prep/site" -cf - . | xz -T2 -6 > .gpu/site.tar.xz
cp "$here"/kit/*.py "$here/aot.py" "$here/first_run.sh" .gpu/
size=$(du -sb .gpu | cut -f1)
echo ".gpu: $size bytes"
[ "${AOT:-no}" = yes ] || [ "$size" -le 10485760 ] || { echo "more than 10 MB: leave something out"; exit 1; }
