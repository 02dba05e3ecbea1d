"""Arrays and trees: storage, slots and segment trees. Knows no buffer."""
