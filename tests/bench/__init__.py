"""The same file through vLLM's run_batch, a stock ray.data.llm script and cloister, alternating."""
