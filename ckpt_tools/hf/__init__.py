"""HF directories: their files, their lineage, and their logits."""
