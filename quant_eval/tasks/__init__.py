"""Accuracy on downstream tasks before and after quantization, through lm-evaluation-harness."""
