#!/usr/bin/env bash
# The suite and the smoke study as other CPUs round them, with a process beside that burns each core.
#
#   tests/other_cpus.sh OUT [SETTING...]     # settings: native avx2 sse (default: all); part of `make stress`
#
# BURNERS=0 leaves the burners out, PYTEST="tests/train -x" chooses other tests, PYTEST=- none.
# OUT/SETTING gets pytest.log and the study; a table of what the study's figures are under each setting comes last.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -eq 0 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
out=$1
shift
settings=("$@")
[ ${#settings[@]} -gt 0 ] || settings=(native avx2 sse)
export OMP_NUM_THREADS=1

# torch's own kernels, oneDNN, MKL (which multiplies torch's fp32 matrices on x86) and numpy's OpenBLAS each choose.
variables_of() {
    case $1 in
        native) ;;
        avx2) echo ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell ;;
        sse) echo ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Nehalem ;;
        *) return 1 ;;
    esac
}

for setting in "${settings[@]}"; do
    variables_of "$setting" >/dev/null || { echo "error: no setting '$setting'; give native, avx2 or sse" >&2; exit 2; }
done

burners=()
trap '[ ${#burners[@]} -eq 0 ] || kill "${burners[@]}" 2>/dev/null' EXIT
trap 'exit 130' INT TERM
for _ in $(seq "${BURNERS:-$(nproc)}"); do
    while :; do :; done &
    burners+=($!)
done

failed=0
for setting in "${settings[@]}"; do
    place=$out/$setting
    mkdir -p "$place"
    read -ra variables <<<"$(variables_of "$setting")"
    if [ "${PYTEST:=tests}" != - ]; then
        read -ra chosen <<<"$PYTEST"
        env "${variables[@]}" .venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "${chosen[@]}" >"$place/pytest.log" 2>&1 ||
            failed=1
        echo "$setting: $(tail -n 1 "$place/pytest.log")"
    fi
    env "${variables[@]}" .venv/bin/python -m study run tiny --profile smoke --root "$place" >"$place/study.log" 2>&1 ||
        { failed=1; echo "$setting: the smoke study failed, see $place/study.log"; }
done
.venv/bin/python -m tests.cpu_noise "${settings[@]/#/$out/}" || failed=1
exit $failed
