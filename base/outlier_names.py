"""Names of outlier statistics, which tables and figures read without torch; see `base.outliers`."""

STATISTICS = ("kurtosis", "max_to_mean", "max_to_median", "top_channels")
KINDS = ("input", "weight")  # what the statistics are of
FIGURES = tuple(f"{kind}_{statistic}" for kind in KINDS for statistic in STATISTICS)
