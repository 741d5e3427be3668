"""Advantage estimators: group-relative, GAE, REINFORCE++; whitening and token rewards."""
