"""Averages of models: soups, weighted means and LAWA windows, summed some rows at a time."""
