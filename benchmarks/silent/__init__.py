"""Public faults that train on the wrong thing without a word, each with the peer's number and ours."""
