"""Beside vLLM: keeps a pool within its bounds and whole, and tells how it is. Knows neither vLLM nor torch."""
