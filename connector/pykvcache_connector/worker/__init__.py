"""The half of the connector in each worker's process: moves bytes, decides nothing."""
