"""Trainer ranks: the worker process, the group of workers, a model as the algorithm sees it."""
