"""Decides the open settings of a configuration (null or `auto`), once, before a run writes its config.yaml."""
