"""Rate limiters, which keep collecting and learning in proportion."""
