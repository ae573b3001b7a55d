"""Blocks as files on a disk. Knows neither vLLM nor torch nor any policy."""
