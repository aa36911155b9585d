"""The bundled tiny models, their prompts and questions. The scripts are in tools/zoo."""
