"""The server over HTTP: OpenAI's images and videos."""
