"""Trainer ranks: the worker process, the group of workers, a model on its ranks, the train batch on the ranks."""
