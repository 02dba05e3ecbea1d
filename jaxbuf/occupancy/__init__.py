"""Occupancies: they know which slots are live, where new items go, and how old items are."""
