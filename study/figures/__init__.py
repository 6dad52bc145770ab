"""Parts that the figures of a report share: charts, looks of runs, panels along training."""
