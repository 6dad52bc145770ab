"""Averages of models, summed some rows at a time, and made again from their lineage."""
