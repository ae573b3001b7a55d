"""The half of the connector in the scheduler's process: decides, never blocks, sees no bytes."""
