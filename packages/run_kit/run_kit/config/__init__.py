"""Typed config: YAML, presets, dotted overrides, help."""
