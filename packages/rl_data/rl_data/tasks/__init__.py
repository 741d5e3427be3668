"""Built-in tasks, and a tiny model that learns them."""
