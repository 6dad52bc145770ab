#!/bin/bash
#SBATCH --job-name=olmo2-7b-lr.quantize-gptq-b3-g128.1
#SBATCH --output=/shared/quantdyn/olmo2-7b-lr/slurm/logs/quantize-gptq-b3-g128.1-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@900
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --mem=1T
#SBATCH --time=12:00:00
#SBATCH --gpus-per-node=h200:8
#SBATCH --partition=batch
#SBATCH --account=llm_pretrain
#SBATCH --qos=normal
#SBATCH --exclude=h[013,200-203]
#SBATCH --switches=1@00:10:00

self=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}  # a plain id may mean the whole array
stop=/shared/quantdyn/olmo2-7b-lr/slurm/stop/$self.${SLURM_RESTART_COUNT:-0}
mkdir -p /shared/quantdyn/olmo2-7b-lr/slurm/stop || exit 1
trap 'echo "$SECONDS" >"$stop" && trap "" USR1 TERM' USR1 TERM
echo "== $(date -u +%FT%TZ) $self start ${SLURM_RESTART_COUNT:-0} on ${SLURM_JOB_NODELIST:-}"

export OMP_NUM_THREADS=12
export RAYON_NUM_THREADS=1
export TOKENIZERS_PARALLELISM=false
export PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1
export MLFLOW_DISABLE_TELEMETRY=true
export DO_NOT_TRACK=true
export SRUN_CPUS_PER_TASK=96
export NCCL_NET=IB
export NCCL_DEBUG=WARN
export NCCL_SOCKET_IFNAME==ib0
export GLOO_SOCKET_IFNAME=ib0
export QUANTDYN_IMAGE='registry.example.org#llm/quantdyn:25.06'
export PYTHONNOUSERSITE=1
export MLFLOW_TRACKING_URI=https://mlflow.example.org:5000
export HF_HOME='/shared/hf cache'
export GREETING='it'"'"'s $HOME and `whoami`'
export PYTHONPATH=/shared/src/quantdyn"${PYTHONPATH:+:$PYTHONPATH}"

set -uo pipefail
cd /shared/src/quantdyn || exit 1
exec 9<> <(:)
{
    trap : USR1 TERM
    /shared/quantdyn/.venv/bin/python -m slurm job /shared/quantdyn/olmo2-7b-lr quantize-gptq-b3-g128.1 "$SLURM_ARRAY_TASK_ID" "$stop" 9>&-
    echo "$?" >&9
} &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
read -r -t 1 rc <&9 || rc=137  # nothing there: it was killed
# It ended without a word to others, which may start now, or to have itself submitted again.
[ "$rc" -lt 128 ] || /shared/quantdyn/.venv/bin/python -m slurm advance /shared/quantdyn/olmo2-7b-lr --ending "$self"
srun --ntasks-per-node=1 enroot remove --force pyxis_quantdyn_${SLURM_JOB_ID:-0}_${SLURM_RESTART_COUNT:-0} >/dev/null 2>&1
exit "$rc"
