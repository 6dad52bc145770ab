"""The judging of claims by the data of a study; which claims there are, content says."""
