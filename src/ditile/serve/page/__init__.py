"""The web page of the server, made with Gradio: a client of the server's own API."""
