"""What a config.json says of quantised weights, a file for each method. Knows no tensors, loads no torch."""
