"""The bundled tiny models, their prompts and questions. tools/zoo has the scripts behind them."""
