"""Advantage estimators: group-relative, of turns, GAE, REINFORCE++; token rewards and whitening."""
