"""The figures themselves: every `Figure` that a module of this folder defines is in the report.

A new figure is one new module here, with a function below `@figure(...)`.
"""
