#!/bin/bash
#SBATCH --job-name=olmo2-7b-lr.quantize-gptq-b3-g128.1
#SBATCH --output=/project/p123/quantdyn/olmo2-7b-lr/slurm/logs/quantize-gptq-b3-g128.1-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=5
#SBATCH --gres=gpu:1
#SBATCH --account=p123
#SBATCH --constraint=a100&(ib|roce)

self=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}  # a plain id may mean the whole array
stop=/project/p123/quantdyn/olmo2-7b-lr/slurm/stop/$self.${SLURM_RESTART_COUNT:-0}
mkdir -p /project/p123/quantdyn/olmo2-7b-lr/slurm/stop || exit 1
trap 'echo "$SECONDS" >"$stop" && trap "" USR1 TERM' USR1 TERM
echo "== $(date -u +%FT%TZ) $self start ${SLURM_RESTART_COUNT:-0} on ${SLURM_JOB_NODELIST:-}"

# The site's own.
source /etc/profile.d/lmod.sh
module purge
module load GCC/13.2.0 apptainer/1.3 || exit 1

export OMP_NUM_THREADS=1
export RAYON_NUM_THREADS=1
export TOKENIZERS_PARALLELISM=false
export PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1
export MLFLOW_DISABLE_TELEMETRY=true
export DO_NOT_TRACK=true
export FI_PROVIDER=efa
export NCCL_DEBUG=WARN
export QUANTDYN_IMAGE=/project/p123/quantdyn.sif
export PYTHONNOUSERSITE=1
export PYTHONPATH=/project/p123/src"${PYTHONPATH:+:$PYTHONPATH}"

set -uo pipefail
cd /project/p123/src || exit 1
exec 9<> <(:)
{
    trap : USR1 TERM
    /usr/bin/python3.12 -m slurm job /project/p123/quantdyn/olmo2-7b-lr quantize-gptq-b3-g128.1 "$SLURM_ARRAY_TASK_ID" "$stop" 9>&-
    echo "$?" >&9
} &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
read -r -t 1 rc <&9 || rc=137  # nothing there: it was killed
# It ended without a word to others, which may start now, or to have itself submitted again.
[ "$rc" -lt 128 ] || /usr/bin/python3.12 -m slurm advance /project/p123/quantdyn/olmo2-7b-lr --ending "$self"
exit "$rc"
