"""Arrays and trees: storage, slots and segment trees. Imports no buffer."""
