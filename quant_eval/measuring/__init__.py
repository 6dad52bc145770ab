"""One measurement: quantized, evaluated, with intervals."""
