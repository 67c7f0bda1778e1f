"""The HTTP API: OpenAI's Files, Batches and Models endpoints."""
