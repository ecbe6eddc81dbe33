"""`nanovllm serve`: an HTTP server with OpenAI's and Anthropic's interfaces over `AsyncLLM`."""
