"""The loss on the plane through three models: two checkpoints and a quantized one."""
