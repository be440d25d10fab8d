"""`lockstep submit`: writes what a cluster needs to start a training program: SLURM, Kubernetes, Ray."""
