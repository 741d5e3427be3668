"""What `plinth doctor` checks on this machine: GPUs, packages, compilers, memory, disks, limits and ports."""
