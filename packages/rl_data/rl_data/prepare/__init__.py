"""Turns data sets as published into training and validation files: `python -m rl_data prepare`."""
