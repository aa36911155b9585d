"""The bundled tiny models, the words they write, and the scripts that made them."""
