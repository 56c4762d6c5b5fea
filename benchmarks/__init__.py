"""Benchmarks: one module a row of the table in README.md, each a ratio of two things run alternately."""
