"""Runs a plan of measurements on a rented machine in calls of a few minutes."""
