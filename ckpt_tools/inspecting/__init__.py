"""What a checkpoint or HF directory is: keys, shapes, hashes, and what made it."""
