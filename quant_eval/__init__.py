"""The cost of quantizing a checkpoint: own RTN and GPTQ, others' methods, paired losses."""
