"""An app's run: job config, preflight checks, inputs, composition."""
