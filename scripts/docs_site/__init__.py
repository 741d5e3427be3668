"""The documentation site: pages that are generated, MkDocs' hook, and checks of the built site."""
