#!/bin/bash
#SBATCH --job-name=olmo2-7b-lr.train
#SBATCH --output=/lab/studies/olmo2-7b-lr/slurm/logs/train-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@40
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=2000M
#SBATCH --time=1
#SBATCH --partition=train

self=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}  # a plain id may mean the whole array
stop=/lab/studies/olmo2-7b-lr/slurm/stop/$self.${SLURM_RESTART_COUNT:-0}
mkdir -p /lab/studies/olmo2-7b-lr/slurm/stop || exit 1
trap 'echo "$SECONDS" >"$stop" && trap "" USR1 TERM' USR1 TERM
echo "== $(date -u +%FT%TZ) $self start ${SLURM_RESTART_COUNT:-0} on ${SLURM_JOB_NODELIST:-}"

export OMP_NUM_THREADS=1
export RAYON_NUM_THREADS=1
export TOKENIZERS_PARALLELISM=false
export PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1
export MLFLOW_DISABLE_TELEMETRY=true
export DO_NOT_TRACK=true
export SRUN_CPUS_PER_TASK=2
export NCCL_SOCKET_IFNAME==lo
export GLOO_SOCKET_IFNAME=lo
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=40
export PYTHONPATH=/lab/quantdyn"${PYTHONPATH:+:$PYTHONPATH}"

set -uo pipefail
cd /lab/quantdyn || exit 1
exec 9<> <(:)
{
    trap : USR1 TERM
    /lab/venv/bin/python -m slurm job /lab/studies/olmo2-7b-lr train "$SLURM_ARRAY_TASK_ID" "$stop" 9>&-
    echo "$?" >&9
} &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
read -r -t 1 rc <&9 || rc=137  # nothing there: it was killed
# It ended without a word to others, which may start now, or to have itself submitted again.
[ "$rc" -lt 128 ] || /lab/venv/bin/python -m slurm advance /lab/studies/olmo2-7b-lr --ending "$self"
exit "$rc"
