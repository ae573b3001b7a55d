"""py-kvcache inside vLLM: keeps KV blocks on disk through vLLM's KV Offload interface."""
