"""Multi-turn episodes, reward pools and reward services."""
