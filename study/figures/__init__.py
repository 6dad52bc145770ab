"""The figures of a report: `drawn` has a module for each, `charts` and `canvas` what they share."""
