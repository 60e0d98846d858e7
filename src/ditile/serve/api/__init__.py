"""The server over HTTP: OpenAI's images and videos, and AUTOMATIC1111's calls."""
