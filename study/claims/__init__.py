"""What a study's data say of the claims of arXiv 2510.06213, each with its statistic."""
