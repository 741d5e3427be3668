"""Jobs of clusters: batch files for SLURM, manifests for Kubernetes."""
