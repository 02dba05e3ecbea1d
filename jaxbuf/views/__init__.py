"""Pure functions that turn samples into inputs of a learner."""
