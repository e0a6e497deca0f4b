"""Starting a job: local torchrun, Slurm."""
