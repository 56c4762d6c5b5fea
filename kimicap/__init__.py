"""Capture what happens inside Kimi-Linear and Kimi-K3 to labelled zarr arrays."""
