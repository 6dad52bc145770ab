"""The claims of arXiv 2510.06213 and of what was said since, each judged by the data of a study.

A new claim is a function below `@claim(...)` and its place in `dynamics.content`.
"""
