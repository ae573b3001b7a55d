"""The `pykvcache` command: finds each part's sub-commands and loads them only when they are called."""
