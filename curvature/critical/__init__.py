"""Curvature along a direction, and the step at which the loss rises, by forward passes alone."""
