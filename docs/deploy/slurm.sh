#!/bin/sh
# One model on two machines of a cluster: sbatch slurm.sh
# Built by: moec build model.toml --target native-x2 -o model.moec
#SBATCH --job-name=moec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=08:00:00

# Slurm must be built with the same interface that the MPI uses; `srun --mpi=list` names those that it has.
export MOEC_THREADS="$SLURM_CPUS_PER_TASK"
MOEC_API_KEY="$(cat "$HOME/moec.key")"
export MOEC_API_KEY
exec srun --mpi=pmix moec run model.moec serve --host 0.0.0.0 --port 8080
