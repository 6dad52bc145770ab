"""Cost and memory of a measurement before it starts."""
