"""The trainer's side of a sync: the pusher, the session with the workers, the control of the servers."""
