"""Policy, value and entropy losses, and how token losses aggregate into the mini-batch loss."""
