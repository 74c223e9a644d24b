"""HTTP server with OpenAI's endpoints; requires the extra `serve`."""
