"""Benchmarks: one command a figure; tables in the README of each folder."""
