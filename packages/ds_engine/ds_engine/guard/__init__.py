"""The collective guard: detects ranks whose collectives diverge."""
