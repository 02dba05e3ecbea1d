"""Which slots are live, where new items go, and how old the live ones are."""
