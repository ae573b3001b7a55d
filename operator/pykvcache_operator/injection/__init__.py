"""What makes a vLLM pod use a pool, as one pure function: `inject.inject`. No client, no clock, no randomness."""
