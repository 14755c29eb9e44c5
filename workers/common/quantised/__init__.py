"""What a config.json says of quantised weights. Knows no tensors, loads no torch."""
