"""How bucket bytes reach the workers: one module per transport, behind the two Protocols of ``base``."""
