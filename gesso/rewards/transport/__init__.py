"""Where rewards run: worker processes, HTTP clients and server, event loop, cache. No scorers."""
