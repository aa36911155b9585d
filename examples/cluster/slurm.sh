#!/usr/bin/env bash
# Two nodes with eight GPUs each:   sbatch examples/cluster/slurm.sh sd35-ocr sampler.batch=8
# The working folder must be on a path that all nodes share, with gesso[ray] installed in .venv.
#SBATCH --job-name=gesso
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:INT@120
set -euo pipefail

source .venv/bin/activate
export RAY_USAGE_STATS_ENABLED=0
export RAY_gcs_rpc_server_reconnect_timeout_s=30 # after which nodes stop that do not reach the first one
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000)) # other jobs may use the same node

# Starts Ray on every node, runs the command on the first one, and stops Ray there when it ends. The
# other nodes notice: if srun had to kill them, the job would count as failed.
srun --wait=180 ray symmetric-run --address "$head:$port" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
  gesso train "$@" cluster.address=auto cluster.restarts=3
