"""Advantage estimators: group-relative, GAE, REINFORCE++; token rewards and whitening."""
