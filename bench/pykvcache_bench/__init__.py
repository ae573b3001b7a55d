"""Measurements: calibration, microbenchmarks, workloads."""
