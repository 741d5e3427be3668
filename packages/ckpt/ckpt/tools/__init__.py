"""Tools around checkpoints: remote storage, universal format, exports, command line."""
