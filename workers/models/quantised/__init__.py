"""Reads matrices that a directory has in quantised tensors, a file for each layout of them."""
