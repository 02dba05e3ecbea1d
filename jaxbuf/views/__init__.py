"""Pure functions from samples to what a learner wants."""
