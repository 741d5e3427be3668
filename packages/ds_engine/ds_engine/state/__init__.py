"""Engine state: save, load, reshape to another world size or stage, export."""
