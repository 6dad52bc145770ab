"""The claims of arXiv 2510.06213, each judged by the data of a study.

A module here may define claims with `@claim(...)`: all are discovered, so a new one is a function
in one file.
"""
