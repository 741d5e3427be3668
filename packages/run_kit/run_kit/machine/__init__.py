"""Checks of `plinth doctor` on this machine: GPUs, packages, compilers, memory and disks."""
