"""Recipes: an ablation as a plain Python function that returns a Study.

A recipe imports `parts`; `dynamics.recipes.demo` is one to begin with. `resolve` finds the recipe
of a name or of a user's file, and changes its runs as the options say.
"""
