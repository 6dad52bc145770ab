"""A run's exports laid out for others: names, an index of the trajectory, model cards."""
