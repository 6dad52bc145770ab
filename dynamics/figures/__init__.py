"""The figures of a study of quantization along training.

A new figure is a function below `@figure(...)` and its place in `dynamics.content`.
"""
