"""Completion of the `plinth` command in bash, zsh and fish: collects words from the commands' help, writes a script."""
