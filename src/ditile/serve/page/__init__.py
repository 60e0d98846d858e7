"""The web page of the server, made with Gradio: it generates by the same service as the routes do."""
