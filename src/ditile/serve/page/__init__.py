"""The web page of the server, made with Gradio: it draws by the same service as the routes do."""
