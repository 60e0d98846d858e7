"""The server over HTTP: OpenAI's pictures and videos, AUTOMATIC1111's calls, and what watches a server."""
