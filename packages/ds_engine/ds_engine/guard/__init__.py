"""Collective guard: logs the collectives of every rank and reports ranks that diverge or stall."""
