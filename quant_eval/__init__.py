"""What quantization costs a checkpoint: own RTN and GPTQ, losses paired over documents, bootstrap intervals."""
