"""The DeepSpeed engine. Importing it needs deepspeed; without CUDA it runs on CPU over gloo."""
