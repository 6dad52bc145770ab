"""The content of arXiv 2510.06213: its recipes, claims, mechanism, choices and figures."""
