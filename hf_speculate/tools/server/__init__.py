"""HTTP server with OpenAI's endpoints; needs the extra `serve`."""
