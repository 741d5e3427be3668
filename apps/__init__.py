"""Applications composed of the packages; nothing but tests imports them."""
