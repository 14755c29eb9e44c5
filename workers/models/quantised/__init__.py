"""Reads matrices that directories store quantised. One module for each layout."""
