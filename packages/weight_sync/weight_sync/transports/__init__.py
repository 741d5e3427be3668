"""Transports move buckets: shared memory, CUDA IPC, NCCL, TCP. Each module holds both ends."""
